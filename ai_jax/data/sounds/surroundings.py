"""Nature and machines around us: birds, insects, water, weather, fans, engines; background beds."""

from __future__ import annotations

import numpy as np

from ai_jax.data.sounds.dsp import (
    RATE,
    Audio,
    Rng,
    add,
    choose,
    decay,
    filtered,
    high_pass,
    hull,
    line,
    log_uniform,
    low_pass,
    noise,
    peak,
    pulses,
    samples,
    shelf,
    sine,
    time,
    unit,
    wander,
)


def birds(rng: Rng) -> Audio:
    """Songs of one to three birds: each repeats its own phrase of chirps, trills and whistles."""
    out = np.zeros(samples(rng.uniform(2.0, 5.5)))
    for _ in range(int(rng.integers(1, 4))):
        base, syllables = log_uniform(rng, 1700, 5500), []
        for _ in range(int(rng.integers(1, 5))):
            m = samples(log_uniform(rng, 0.03, 0.3))
            span = rng.uniform(0.6, 1.5, 3)
            f = base * line(m, (0, span[0]), (rng.uniform(0.2, 0.8), span[1]), (1, span[2]))
            if rng.random() < 0.3:
                f = f * (1 + rng.uniform(0.02, 0.15) * sine(rng.uniform(20, 60), m))
            x = sine(np.clip(f, 300, 7600), m)
            if rng.random() < 0.3:
                x = x + 0.3 * sine(np.clip(2 * f, 300, 7600), m)
            syllables.append(x * hull(m, 0.3 * m / RATE, 0.4 * m / RATE))
        at, gain = rng.uniform(0, 1), log_uniform(rng, 0.2, 1)
        while at < len(out) / RATE:
            for syllable in syllables * int(rng.integers(1, 4)):
                add(out, syllable, at, gain * rng.uniform(0.7, 1))
                at += len(syllable) / RATE + rng.uniform(0.01, 0.12)
            at += rng.uniform(0.2, 1.5)
    return out


def insects(rng: Rng) -> Audio:
    """Crickets and cicadas: high tones chopped by wing strokes; sometimes a buzzing fly."""
    n = samples(rng.uniform(2.0, 5.0))
    if rng.random() < 0.2:
        f0 = log_uniform(rng, 130, 280) * np.exp(wander(rng, n, 3, 0.06))
        level = np.clip(0.6 + wander(rng, n, 2, 0.5), 0.05, 2)
        return filtered(pulses(f0), low_pass(1500), high_pass(200)) * level * hull(n, 0.1, 0.1)
    out = np.zeros(n)
    for _ in range(int(rng.integers(1, 4))):
        f, strokes = rng.uniform(3600, 7000), rng.uniform(18, 70)
        chirp_rate, duty = rng.uniform(0.8, 4), rng.uniform(0.3, 1.1)
        t = time(n) + rng.random()
        wing = 0.5 - 0.5 * np.cos(2 * np.pi * strokes * t)
        chirp = np.clip(np.sin(2 * np.pi * chirp_rate * t) + 2 * duty - 1, 0, 0.3) / 0.3
        tone = sine(f, n) + rng.uniform(0, 0.5) * filtered(noise(rng, n), peak(f, 600))
        out += log_uniform(rng, 0.2, 1) * tone * wing * chirp
    return out * hull(n, 0.1, 0.1)


def water(rng: Rng) -> Audio:
    """Dripping, pouring, a stream or a tap: bubbles that chirp upwards over splashing noise."""
    n = samples(rng.uniform(2.0, 5.5))
    kind = choose(rng, "drip", "pour", "stream", "stream", "tap")
    rate = {"drip": rng.uniform(0.7, 4), "pour": 60, "stream": rng.uniform(40, 150), "tap": 30}[
        kind
    ]
    out = np.zeros(n)
    bubbles = int(rng.poisson(rate * n / RATE)) + 1
    glug = np.exp(wander(rng, n, 5, 0.3))
    for at in rng.uniform(0, n / RATE, min(bubbles, 700)):
        f = log_uniform(rng, 500, 3500) * (0.7 if kind == "pour" else 1.0)
        t60 = rng.uniform(0.02, 0.09) * (1.0 + (kind == "drip"))
        m = samples(t60)
        blip = sine(f * line(m, (0, 1), (1, rng.uniform(1.05, 1.6))), m) * decay(m, t60, 0.002)
        add(out, blip, at, log_uniform(rng, 0.1, 1) * (1.0 if kind == "drip" else 0.5))
    if kind != "drip":
        hiss = noise(rng, n, rng.uniform(0, 3)) * np.exp(wander(rng, n, 20, 0.15))
        centre = log_uniform(rng, 700, 4500)
        hiss = filtered(hiss, shelf((centre, 1.5 * centre, 1.0), floor=0.2), high_pass(200))
        out = out / (out.std() + 1e-9) * rng.uniform(0.1, 1) + hiss / hiss.std()
        out *= glug if kind == "pour" else 1.0
    return out * hull(n, 0.05, 0.1)


def weather(rng: Rng) -> Audio:
    """Wind that howls and gusts, or rain from drizzle to downpour."""
    n = samples(rng.uniform(3.0, 6.0))
    if rng.random() < 0.5:
        gust = np.exp(wander(rng, n, 1.0, 0.6))
        x = filtered(noise(rng, n, 6), low_pass(log_uniform(rng, 200, 900)))
        x = x / x.std()
        if rng.random() < 0.6:
            centre = log_uniform(rng, 250, 900)
            howl = filtered(noise(rng, n), peak(centre, 0.12 * centre))
            x = x + rng.uniform(0.2, 1.2) * howl / howl.std() * gust
        return x * gust * hull(n, 0.3, 0.3)
    x = noise(rng, n, rng.uniform(0, 3)) * (1 + wander(rng, n, 3, 0.05))
    drops = rng.random(n) < log_uniform(rng, 500, 5000) / RATE
    patter = filtered(
        drops * rng.exponential(1.0, n), shelf((rng.uniform(1500, 5000), 2500, 1), floor=0.1)
    )
    x = rng.uniform(0.3, 1) * x / x.std() + rng.uniform(0.1, 1) * patter / (patter.std() + 1e-9)
    return x * hull(n, 0.2, 0.2)


def fan(rng: Rng) -> Audio:
    """Fans, air conditioning, hair dryers, vacuum cleaners: rushing air and the motor's tone."""
    n = samples(rng.uniform(2.5, 6.0))
    air = filtered(noise(rng, n, rng.uniform(2, 5)), low_pass(log_uniform(rng, 600, 5000)))
    blade = log_uniform(rng, 8, 60)
    air = air / air.std() * (1 + rng.uniform(0, 0.3) * sine(blade, n))
    f0 = log_uniform(rng, 45, 260) * np.ones(n)
    if rng.random() < 0.25:  # it spins up or down
        f0 = f0 * line(n, (0, rng.uniform(0.4, 1)), (0.5, 1), (1, rng.uniform(0.4, 1)))
    motor = filtered(
        pulses(f0 * (1 + wander(rng, n, 2, 0.002))), low_pass(log_uniform(rng, 200, 2000))
    )
    return (air + rng.uniform(0, 0.4) * motor / motor.std()) * hull(n, 0.3, 0.3)


def engine(rng: Rng) -> Audio:
    """Cars, lorries, motorcycles, aeroplanes: idling, accelerating, passing by."""
    n = samples(rng.uniform(2.5, 6.0))
    f0 = log_uniform(rng, 22, 110)
    pace = choose(rng, (1, 1, 1), (1, 1.8, 1.4), (0.8, 1.1, 1.6), (1.1, 1.05, 0.85))
    f0 = f0 * line(n, (0, pace[0]), (0.5, pace[1]), (1, pace[2])) * (1 + wander(rng, n, 8, 0.01))
    strokes = pulses(f0) * (1 + 0.3 * sine(f0 / 2, n)) * (1 + wander(rng, n, 40, 0.2))
    body = shelf(
        (log_uniform(rng, 80, 250), 150, 1), (log_uniform(rng, 300, 1200), 500, 0.4), floor=0.05
    )
    strokes = filtered(strokes, body, low_pass(log_uniform(rng, 300, 2500)))
    road = filtered(noise(rng, n, rng.uniform(2, 5)), peak(log_uniform(rng, 300, 1200), 1200))
    x = rng.uniform(0, 1) * strokes / strokes.std() + rng.uniform(0.1, 1) * road / road.std()
    if rng.random() < 0.5:
        at = rng.uniform(0.3, 0.7)
        x = x / (1 + ((np.linspace(0, 1, n) - at) / rng.uniform(0.08, 0.3)) ** 2)
    return x * hull(n, 0.2, 0.2)


def bed(rng: Rng, seconds: float) -> Audio:
    """Background for ``seconds``: coloured noise, mains hum, room tone or hiss; RMS about 0.1."""
    n = samples(seconds)
    x = noise(rng, n, choose(rng, 0.0, 3.0, 3.0, 4.5, 6.0)) * np.exp(wander(rng, n, 0.5, 0.15))
    if rng.random() < 0.5:
        x = filtered(x, low_pass(log_uniform(rng, 400, 6000)))
    x = x / (x.std() + 1e-9)
    if rng.random() < 0.3:
        mains = choose(rng, 50.0, 60.0)
        for k in (1, 2, 3, 4, 6, 8):
            x = x + log_uniform(rng, 0.05, 1.0) / k * sine(k * mains, n, rng.uniform(0, 6))
    return 0.1 * unit(x) * np.abs(x).max() / (x.std() + 1e-9)
