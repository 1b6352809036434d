"""Made by devices that want to be heard: smoke alarms, sirens, horns, doorbells, telephones."""

from __future__ import annotations

import numpy as np

from ai_jax.data.sounds.dsp import (
    RATE,
    Audio,
    Rng,
    add,
    choose,
    convolved,
    decay,
    filtered,
    high_pass,
    hull,
    line,
    log_uniform,
    low_pass,
    modes,
    noise,
    peak,
    pulses,
    samples,
    shelf,
    sine,
    time,
    wander,
)


def _tone(rng: Rng, frequency: float | Audio, n: int, brightness: float) -> Audio:
    """A sine with a few weak harmonics, as a piezo disc or a small speaker plays it."""
    frequency = np.broadcast_to(frequency, n)
    out = sine(frequency, n)
    for k in (2, 3, 4, 5):
        if k * frequency.max() < 0.48 * RATE:
            gain = brightness ** (k - 1) * rng.uniform(0.3, 1.2)
            out = out + gain * sine(k * frequency, n, rng.uniform(0, 6))
    return out


def smoke_alarm(rng: Rng) -> Audio:
    """Temporal-three and temporal-four patterns of 3 kHz piezos and 520 Hz sounders, fast beeps."""
    kind = choose(rng, "t3", "t3", "t3", "t4", "fast", "solid", "sweep")
    low = kind == "t3" and rng.random() < 0.2
    frequency = rng.uniform(480, 560) if low else rng.uniform(2700, 3600)
    stretch = rng.uniform(0.85, 1.15)
    beep, gap, count, pause = {
        "t3": (0.5, 0.5, 3, 1.5),
        "t4": (0.1, 0.1, 4, rng.uniform(2.0, 5.0)),
        "fast": (rng.uniform(0.06, 0.3), rng.uniform(0.04, 0.2), 1000, 0.0),
        "solid": (rng.uniform(2.0, 6.0), 0.3, 1, 1.0),
        "sweep": (rng.uniform(0.12, 0.4), rng.uniform(0.005, 0.05), 1000, 0.0),
    }[kind]
    out = np.zeros(samples(rng.uniform(3.0, 6.0)))
    brightness = rng.uniform(0.3, 0.7) if low else rng.uniform(0.05, 0.4)
    m = samples(beep * stretch)
    path = frequency * line(m, (0, rng.uniform(0.75, 0.9)), (1, 1.0)) if kind == "sweep" else None
    note = _tone(rng, frequency if path is None else path, m, brightness)
    if low:  # a square wave
        note = np.tanh(rng.uniform(2, 6) * note)
    elif rng.random() < 0.4:  # two discs, or a rough drive
        note = note * (1 + rng.uniform(0.2, 1) * sine(log_uniform(rng, 15, 220), m))
    note = note * hull(m, rng.uniform(0.001, 0.01), rng.uniform(0.002, 0.03))
    at = rng.uniform(0, 0.4)
    while at < len(out) / RATE:
        for _ in range(count):
            add(out, note, at)
            at += (beep + gap) * stretch
            if at > len(out) / RATE:
                break
        at += pause * stretch
    return out


def siren(rng: Rng) -> Audio:
    """Wail, yelp, piercer, hi-lo, air raid and mechanical sirens, passing by or standing."""
    n = samples(rng.uniform(3.0, 6.0))
    t = time(n)
    kind = choose(rng, "wail", "wail", "yelp", "yelp", "mixed", "hilo", "hilo", "raid", "beeps")
    if kind in ("wail", "yelp", "mixed"):
        low, ratio = log_uniform(rng, 450, 900), rng.uniform(1.5, 2.9)
        rate = rng.uniform(0.15, 0.6) if kind == "wail" else rng.uniform(1.8, 4.5)
        if kind == "mixed":
            rate = np.where(t < rng.uniform(0.3, 0.7) * t[-1], rng.uniform(0.2, 0.5), rate)
        turn = (np.cumsum(np.broadcast_to(rate, n)) / RATE + rng.random()) % 1.0
        rise = rng.uniform(0.3, 0.85)
        up = np.where(turn < rise, turn / rise, (1 - turn) / (1 - rise))
        shape = choose(rng, up, 0.5 - 0.5 * np.cos(np.pi * up), up ** rng.uniform(0.4, 1))
        f0 = low * ratio**shape
    elif kind == "hilo":
        low = log_uniform(rng, 370, 900)
        high = low * choose(rng, 1.19, 1.26, 1.335, 1.335, 1.5)
        period = rng.uniform(0.7, 1.6)
        square = np.tanh(rng.uniform(5, 20) * np.sin(2 * np.pi * (t / period + rng.random())))
        f0 = low + (high - low) * (0.5 + 0.5 * square)
    elif kind == "raid":
        top = log_uniform(rng, 330, 900)
        f0 = top * line(n, (0, 0.35), (rng.uniform(0.2, 0.6), 1.0), (0.8, 0.97), (1, 0.6))
        f0 = f0 * (1 + rng.uniform(0, 0.06) * sine(rng.uniform(0.1, 0.4), n, rng.uniform(0, 6)))
    else:  # repeated upward chirps of an electronic siren
        period = rng.uniform(0.12, 0.6)
        turn = (t / period + rng.random()) % 1.0
        f0 = log_uniform(rng, 600, 1200) * rng.uniform(1.3, 2.5) ** turn
    if rng.random() < 0.5:  # Doppler shift of a passing vehicle
        at, speed = rng.uniform(0, 1) * t[-1], rng.uniform(0.02, 0.09)
        f0 = f0 * (1 - speed * np.tanh((t - at) / rng.uniform(0.3, 1.5)))
    f0 = f0 * (1 + wander(rng, n, 6, rng.uniform(0.001, 0.012)))
    x = pulses(f0) if rng.random() < 0.5 else _tone(rng, f0, n, rng.uniform(0.25, 0.7))
    if kind == "raid" and rng.random() < 0.5:  # a second rotor a minor third above
        x = x + 0.7 * pulses(1.2 * f0)
    x = filtered(x, low_pass(log_uniform(rng, 600, 3000), int(rng.integers(1, 3))))
    centre = log_uniform(rng, 700, 2500)  # the horn of the loudspeaker
    x = filtered(x, shelf((centre, centre, 1.0), floor=rng.uniform(0.1, 0.6)), high_pass(250))
    level = np.exp(wander(rng, n, 1.0, rng.uniform(0.0, 0.4)))
    if rng.random() < 0.4:
        level *= line(
            n, (0, rng.uniform(0.1, 1)), (rng.uniform(0.3, 0.7), 1), (1, rng.uniform(0.1, 1))
        )
    if rng.random() < 0.35:  # echoes between houses
        delay = np.zeros(samples(rng.uniform(0.05, 0.4)))
        delay[0], delay[-1] = 1, rng.uniform(0.1, 0.5)
        x = convolved(x, delay)[:n]
    x = x / (x.std() + 1e-9) * level * hull(n, 0.02, rng.uniform(0.02, 0.6))
    if rng.random() < 0.6:  # engine and road of the vehicle
        x = x + rng.uniform(0.03, 0.35) * noise(rng, n, rng.uniform(3, 6))
    return x


def car_horn(rng: Rng) -> Audio:
    """Two-tone electric horns, truck air horns, old bulb horns: single, double, long, passing."""
    kind = choose(rng, *["car"] * 6, "truck", "truck", "single", "bulb")
    if kind == "truck":
        low = log_uniform(rng, 190, 380)
        tones = [low * r for r in choose(rng, (1, 1.26), (1, 1.2, 1.5), (1, 1.26, 1.5), (1, 1.33))]
    elif kind == "single":
        tones = [log_uniform(rng, 300, 560)]
    elif kind == "bulb":
        tones = [log_uniform(rng, 180, 420)]
    else:
        low = log_uniform(rng, 300, 480)
        tones = [low, low * choose(rng, 1.19, 1.2, 1.25, 1.26, 1.335)]
    blasts = choose(rng, "one", "one", "two", "many", "long")
    lengths = {
        "one": [rng.uniform(0.25, 1.2)],
        "two": [rng.uniform(0.08, 0.3), rng.uniform(0.1, 0.9)],
        "many": list(rng.uniform(0.1, 0.5, int(rng.integers(3, 6)))),
        "long": [rng.uniform(1.2, 3.5)],
    }[blasts]
    gaps = rng.uniform(0.06, 0.35, len(lengths))
    out = np.zeros(samples(sum(lengths) + gaps.sum() + 0.1))
    detune = 1 + rng.normal(0, 0.004, len(tones))
    gains = rng.uniform(0.5, 1, len(tones))
    bright = shelf(
        (log_uniform(rng, 1300, 3200), rng.uniform(600, 2500), rng.uniform(0.3, 3)),
        (log_uniform(rng, 500, 1100), rng.uniform(300, 900), rng.uniform(0.3, 1.5)),
        floor=rng.uniform(0.1, 0.5),
    )
    at = 0.02
    for length, gap in zip(lengths, gaps, strict=True):
        m = samples(length)
        onset = 1 - rng.uniform(0.0, 0.04) * np.exp(-time(m) / rng.uniform(0.01, 0.05))
        if kind == "bulb":
            onset = onset * line(m, (0, 0.8), (0.3, 1.0), (1, rng.uniform(0.6, 0.9)))
        wobble = 1 + wander(rng, m, 15, 0.0015)
        blast = sum(
            g * pulses(f * d * onset * wobble) for f, d, g in zip(tones, detune, gains, strict=True)
        )
        blast = blast + rng.uniform(0, 0.05) * noise(rng, m)
        add(out, blast * hull(m, rng.uniform(0.004, 0.04), rng.uniform(0.01, 0.08)), at)
        at += length + gap
    out = filtered(out, bright, low_pass(log_uniform(rng, 800, 4500)), high_pass(200))
    if rng.random() < 0.3:  # passing by: falling pitch is a change of speed of playback
        n = len(out)
        speed = 1 + rng.uniform(0.02, 0.07) * np.tanh(line(n, (0, 3), (1, -3)))
        out = np.interp(np.cumsum(speed) * n / speed.sum(), np.arange(n), out)
    return out


def doorbell(rng: Rng) -> Audio:
    """Ding-dong chimes, electronic melodies, electric bells and buzzers."""
    kind = choose(rng, *["chime"] * 7, "melody", "bell", "buzzer")
    if kind in ("bell", "buzzer"):
        n = samples(rng.uniform(0.4, 1.8))
        if kind == "buzzer":
            x = np.tanh(3 * pulses(np.full(n, rng.uniform(90, 240))))
            x = filtered(x, peak(log_uniform(rng, 500, 2500), 1500), high_pass(300))
        else:
            base = log_uniform(rng, 1300, 2600)
            stroke = modes(
                samples(0.4), base * np.array([1, 1.5, 2.1, 2.7, 3.3]), [0.5] * 5,
                rng.uniform(0.2, 1, 5), rng,
            )  # fmt: skip
            train = np.zeros(n)
            train[:: samples(1 / rng.uniform(14, 28))] = 1
            x = convolved(train, stroke)
        return x[:n] * hull(n, 0.003, 0.02)
    notes = (
        (1.0, choose(rng, 0.794, 0.794, 0.75, 0.841))
        if kind == "chime"
        else tuple(2 ** (rng.choice([-8, -5, -3, 0, 4, 7, 5, 2], int(rng.integers(3, 9))) / 12))
    )
    base = log_uniform(rng, 480, 1000)
    step = rng.uniform(0.35, 0.9) if kind == "chime" else rng.uniform(0.16, 0.4)
    rings = int(rng.integers(1, 3)) if kind == "chime" else 1
    t60 = log_uniform(rng, 0.8, 3.0)
    partials = choose(rng, (1, 2, 3, 4), (1, 2.76, 5.4, 8.9), (1, 2.0, 3.01, 4.2, 5.4), (1, 4, 10))
    gains = np.array([1.0, *rng.uniform(0.02, 0.45, len(partials) - 1)])
    out = np.zeros(samples(0.05 + step * len(notes) * rings + 0.6 * t60))
    for i, note in enumerate(notes * rings):
        f = base * note * np.array(partials)
        ring = modes(len(out), f, t60 / np.sqrt(partials), gains, rng)
        strike = noise(rng, 160) * decay(160, 0.01) * rng.uniform(0, 0.3)
        ring[:160] += strike
        add(out, ring * hull(len(ring), 0.002, 0.05), 0.02 + i * step * rng.uniform(0.97, 1.03))
    return out


def phone_tones(rng: Rng) -> Audio:
    """Dial tone, busy signal, ring-back, keypad: a telephone in use, not one that rings."""
    kind = choose(rng, "dial", "busy", "ringback", "keys", "keys")
    n = samples(rng.uniform(1.5, 5.0))
    if kind == "keys":
        out = np.zeros(n)
        at = rng.uniform(0, 0.3)
        press, pause = rng.uniform(0.06, 0.25), rng.uniform(0.05, 0.4)
        while at < n / RATE:
            m = samples(press)
            low, high = rng.choice([697, 770, 852, 941]), rng.choice([1209, 1336, 1477])
            add(out, (sine(low, m) + sine(high, m)) * hull(m, 0.003, 0.003), at)
            at += press + pause * rng.uniform(0.5, 1.8)
        return out
    pair = choose(rng, (425, 425), (350, 440), (400, 450), (440, 480), (480, 620))
    x = sine(pair[0], n) + sine(pair[1], n, 1.0)
    on, off = {"dial": (99, 0), "busy": (0.5, 0.5), "ringback": (1.0, rng.uniform(1, 3))}[kind]
    if kind == "busy":
        on = off = rng.uniform(0.2, 0.55)
    gate = (time(n) % (on + off)) < on
    soft = np.convolve(gate.astype(float), np.hanning(129) / np.hanning(129).sum(), "same")
    return np.tanh(rng.uniform(0.5, 2) * x) * soft * hull(n, 0.01, 0.01)
