"""Made by throats: crying babies, coughs, screams, dogs, cats, snoring, sneezes, babble, laughter.

All follow the source-filter model: a glottal pulse train with jitter and breath noise through
moving formants.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ai_jax.data.sounds.dsp import (
    RATE,
    Audio,
    Rng,
    add,
    choose,
    decay,
    filtered,
    formants,
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
    wander,
)

# First three formants (Hz) of an adult man; other throats scale them.
_VOWELS = np.array(
    [
        [730, 1090, 2440],
        [530, 1840, 2480],
        [270, 2290, 3010],
        [570, 840, 2410],
        [300, 870, 2240],
        [640, 1190, 2390],
        [660, 1720, 2410],
        [490, 1350, 1690],
    ],
    dtype=float,
)


def _voice(
    rng: Rng,
    f0: Audio,
    tract: Audio,
    *,
    jitter: float = 0.01,
    breath: float = 0.05,
    tilt: float = 800.0,
    growl: float = 0.0,
    bandwidths: Sequence[float] = (90, 130, 200, 300),
) -> Audio:
    """Glottal source of pitch ``f0`` [n] through formants ``tract`` [n, k] (or [k])."""
    n = len(f0)
    f0 = np.clip(f0 * (1 + wander(rng, n, 60, jitter)), 30, 4000)
    source = filtered(pulses(f0), low_pass(tilt))
    source = source / (source.std() + 1e-9) * (1 + wander(rng, n, 60, 0.1))
    if growl:  # subharmonics and rough amplitude of a strained voice
        source = source * (1 + growl * sine(f0 / 2, n) + growl * wander(rng, n, 300, 0.5))
    source = source + breath * noise(rng, n, -1.0)
    tract = np.broadcast_to(tract, (n, np.shape(tract)[-1]))
    return formants(source, tract, bandwidths[: tract.shape[1]])


def baby_cry(rng: Rng) -> Audio:
    """Wails of 0.4-1.5 s with rising-falling pitch and audible breaths between them."""
    out = np.zeros(samples(rng.uniform(2.5, 5.5)))
    base = log_uniform(rng, 330, 560)
    scale = rng.uniform(1.35, 1.75)
    strain = rng.uniform(0, 0.8)
    length, rest = rng.uniform(0.45, 1.3), rng.uniform(0.12, 0.5)
    at = rng.uniform(0, 0.3)
    while at < len(out) / RATE - 0.25:
        m = samples(length * rng.uniform(0.7, 1.3))
        arch = line(
            m, (0, rng.uniform(0.75, 0.95)), (rng.uniform(0.1, 0.4), rng.uniform(1.0, 1.25)),
            (0.75, rng.uniform(0.95, 1.1)), (1, rng.uniform(0.6, 0.85)),
        )  # fmt: skip
        f0 = base * arch * (1 + rng.uniform(0.005, 0.03) * sine(rng.uniform(5, 9), m))
        if rng.random() < 0.2:  # the voice breaks into a shriek
            f0 = f0 * np.where(np.linspace(0, 1, m) > rng.uniform(0.3, 0.7), rng.uniform(1.5, 2), 1)
        start = scale * np.array([rng.uniform(550, 800), rng.uniform(1050, 1500), 2600.0, 3400.0])
        tract = start * (1 + line(m, (0, -0.1), (0.3, 0.05), (1, rng.uniform(-0.2, 0.0)))[:, None])
        wail = _voice(
            rng, f0, tract, jitter=0.006, breath=rng.uniform(0.03, 0.2), tilt=2200, growl=strain,
            bandwidths=(200, 260, 350, 450),
        )  # fmt: skip
        level = line(m, (0, 0.3), (0.15, 1), (0.8, 0.8), (1, 0.1)) * hull(m, 0.03, 0.08)
        add(out, wail * level, at, rng.uniform(0.7, 1))
        at += m / RATE
        b = samples(rest * rng.uniform(0.6, 1))  # the hasty inhalation
        gasp = filtered(noise(rng, b), peak(log_uniform(rng, 1500, 3200), 1500))
        add(out, gasp * hull(b, 0.4 * b / RATE, 0.3 * b / RATE), at, rng.uniform(0.02, 0.2))
        at += rest * rng.uniform(0.9, 1.3)
    return out


def cough(rng: Rng) -> Audio:
    """One to five coughs: explosive burst, weaker flow of air, then the voiced end."""
    out = np.zeros(samples(rng.uniform(0.9, 2.8)))
    scale = rng.uniform(0.9, 1.35)
    body = scale * np.array([rng.uniform(290, 520), rng.uniform(950, 1450), 2500, 3600])
    dull = low_pass(log_uniform(rng, 900, 3500), 2)
    base, voiced, flow = (
        log_uniform(rng, 95, 300),
        rng.uniform(0.3, 1.5),
        log_uniform(rng, 0.02, 0.15),
    )
    lengths = rng.uniform(0.03, 0.09), rng.uniform(0.04, 0.15), rng.uniform(0.06, 0.2)
    at = rng.uniform(0.02, 0.2)
    for _ in range(int(rng.integers(1, 6))):
        burst, air, end = (samples(s * rng.uniform(0.8, 1.2)) for s in lengths)
        m = burst + air + end
        level = np.concatenate(
            [
                line(burst, (0, 1), (0.5, 1), (1, 0.3)),
                np.full(air, flow),
                flow * line(end, (0, 1), (1, 0)),
            ]
        )
        x = formants(
            noise(rng, m, 2) * level, np.broadcast_to(body, (m, 4)), (150, 200, 300, 400), 0.012
        )
        x = x / (np.abs(x).max() + 1e-9)
        f0 = base * line(end, (0, 1.2), (0.3, 1), (1, 0.75)) * np.exp(wander(rng, end, 100, 0.05))
        voice = _voice(rng, f0, body, jitter=0.03, breath=0.4, tilt=700, growl=rng.uniform(0, 1))
        voice = voice / (np.abs(voice).max() + 1e-9) * line(end, (0, 0), (0.25, 1), (1, 0.1))
        x[burst + air :] += voiced * voice
        add(out, filtered(x, dull) * hull(m, 0.002, 0.03), at, rng.uniform(0.6, 1))
        at += m / RATE + log_uniform(rng, 0.03, 0.5)
        if at > len(out) / RATE - 0.25:
            break
    return out[: samples(min(len(out) / RATE, at + 0.1))]


def scream(rng: Rng) -> Audio:
    """A strained high voice, 0.5-2.2 s, sometimes repeated."""
    length = rng.uniform(0.5, 2.0)
    count = int(rng.integers(1, 3))
    out = np.zeros(samples(count * (length * 1.15 + 0.3)))
    base = log_uniform(rng, 550, 1500) if rng.random() < 0.75 else log_uniform(rng, 320, 600)
    scale = rng.uniform(1.0, 1.35)
    at = 0.02
    for _ in range(count):
        m = samples(length * rng.uniform(0.8, 1.1))
        f0 = base * line(
            m, (0, rng.uniform(0.5, 0.9)), (rng.uniform(0.05, 0.25), 1.0),
            (0.7, rng.uniform(0.9, 1.15)), (1, rng.uniform(0.5, 0.95)),
        )  # fmt: skip
        f0 = f0 * (1 + wander(rng, m, 8, 0.02) + rng.uniform(0, 0.015) * sine(rng.uniform(5, 8), m))
        tract = scale * np.array([rng.uniform(800, 1100), rng.uniform(1300, 1800), 2800, 3900])
        x = _voice(
            rng, f0, tract, jitter=rng.uniform(0.005, 0.03), breath=rng.uniform(0.05, 0.4),
            tilt=3000, growl=rng.uniform(0.2, 1.2), bandwidths=(250, 300, 400, 500),
        )  # fmt: skip
        x = np.tanh(rng.uniform(0.2, 1.0) * x / (x.std() + 1e-9))
        add(out, x * hull(m, rng.uniform(0.02, 0.12), rng.uniform(0.05, 0.3)), at)
        at += m / RATE + rng.uniform(0.1, 0.3)
    return out[: samples(at)]


def dog_bark(rng: Rng) -> Audio:
    """Barks in groups; small dogs yap at 900 Hz, big ones woof at 240 Hz."""
    size = rng.random() ** 1.5
    base = 900 * (240 / 900) ** size * rng.uniform(0.85, 1.2)
    scale = 1.35 - 0.4 * size
    length = rng.uniform(0.08, 0.14) + 0.08 * size
    interval = length + log_uniform(rng, 0.12, 0.6)
    out = np.zeros(samples(rng.uniform(1.5, 4.5)))
    centre = scale * np.array([rng.uniform(650, 950), rng.uniform(1350, 1800), 2600, 3600])
    breath, rough, tilt = rng.uniform(0, 0.8), rng.uniform(0, 1), rng.uniform(500, 1500)
    dull = low_pass(scale * rng.uniform(1400, 2600), 3)
    at, group = rng.uniform(0, 0.2), int(rng.integers(1, 6))
    while at < len(out) / RATE - length:
        for _ in range(group):
            m = samples(length * rng.uniform(0.85, 1.2))
            top = rng.uniform(0.3, 0.6)
            f0 = base * line(m, (0, 0.6), (top, rng.uniform(1, 1.15)), (1, rng.uniform(0.55, 0.85)))
            opening = line(m, (0, 0.5), (top, 1.1), (1, 0.7))[:, None]
            x = _voice(
                rng, f0, centre * opening, jitter=0.03, breath=breath, tilt=tilt, growl=rough,
                bandwidths=(350, 450, 500, 600),
            )  # fmt: skip
            level = line(m, (0, 0), (0.1, 0.5), (top, 1), (0.7, 0.6), (1, 0)) ** 1.3
            x = filtered(x, dull) * level * hull(m, 0.004, 0.03)
            add(out, x, at, rng.uniform(0.7, 1))
            at += interval * rng.uniform(0.85, 1.2)
        at += rng.uniform(0.2, 0.9)
        group = int(rng.integers(1, 4))
    return out


def cat(rng: Rng) -> Audio:
    """Meows: an opening and closing mouth on a gliding voice; sometimes purring."""
    if rng.random() < 0.2:
        n = samples(rng.uniform(1.5, 4.0))
        rate = rng.uniform(22, 30) * (1 + wander(rng, n, 2, 0.03))
        breathing = 1 + 0.5 * sine(rng.uniform(0.6, 1.2), n)
        x = filtered(pulses(rate) + 0.1 * noise(rng, n), low_pass(500, 2), high_pass(60))
        return x * breathing * hull(n, 0.1, 0.1)
    parts = []
    base = log_uniform(rng, 380, 800)
    for _ in range(int(rng.integers(1, 4))):
        m = samples(rng.uniform(0.3, 0.9))
        f0 = base * rng.uniform(0.9, 1.1) * line(
            m, (0, 0.8), (rng.uniform(0.2, 0.5), 1.1), (1, rng.uniform(0.6, 0.85))
        )  # fmt: skip
        mouth = line(m, (0, 0.0), (rng.uniform(0.3, 0.6), 1.0), (1, 0.3))[:, None]
        closed, opened = np.array([450, 2300, 3300, 4300.0]), np.array([1100, 1900, 3500, 4500.0])
        x = _voice(
            rng, f0, closed + mouth * (opened - closed), jitter=0.01, tilt=2000,
            breath=rng.uniform(0.05, 0.3), growl=rng.uniform(0.1, 0.5),
            bandwidths=(350, 450, 600, 700),
        )  # fmt: skip
        parts += [x * hull(m, 0.08, 0.15), np.zeros(samples(rng.uniform(0.3, 1.1)))]
    return np.concatenate(parts)


def animals(rng: Rng) -> Audio:
    """Farm and pond: moos, bleats, quacks, oinks, crows of a cock, croaks."""
    kind = choose(rng, "moo", "bleat", "quack", "oink", "crow", "croak")
    low, high, shortest, longest, scale, rough = {
        "moo": (90, 200, 0.8, 1.8, 0.75, 0.2),
        "bleat": (200, 450, 0.4, 1.1, 1.0, 0.5),
        "quack": (180, 420, 0.08, 0.22, 1.3, 0.8),
        "oink": (70, 180, 0.15, 0.4, 0.9, 1.0),
        "crow": (450, 800, 0.25, 0.9, 1.3, 0.5),
        "croak": (50, 110, 0.15, 0.5, 1.2, 0.6),
    }[kind]
    out = np.zeros(samples(rng.uniform(1.2, 4.0)))
    base = log_uniform(rng, low, high)
    tract = scale * np.array([rng.uniform(500, 800), rng.uniform(1100, 1900), 2600.0, 3500.0])
    at = rng.uniform(0, 0.2)
    while at < len(out) / RATE - shortest:
        m = samples(rng.uniform(shortest, longest))
        arch = line(m, (0, rng.uniform(0.8, 1)), (rng.uniform(0.2, 0.5), 1.1), (1, 0.8))
        x = _voice(
            rng, base * arch, tract, jitter=0.01, breath=rng.uniform(0.02, 0.2), tilt=1200,
            growl=rough * rng.uniform(0.3, 1), bandwidths=(150, 200, 300, 400),
        )  # fmt: skip
        if kind == "bleat":
            x = x * (1 + 0.7 * sine(rng.uniform(7, 12), m))
        add(out, x * hull(m, 0.02 + 0.1 * (kind == "moo"), 0.05), at, rng.uniform(0.6, 1))
        at += m / RATE + rng.uniform(0.05, 0.6)
    return out


def snoring(rng: Rng) -> Audio:
    """Slow rattling inhalations and quieter exhalations."""
    out = np.zeros(samples(rng.uniform(3.0, 6.0)))
    flutter = log_uniform(rng, 28, 90)
    tract = rng.uniform(0.8, 1.2) * np.array([rng.uniform(250, 500), 1100, 2300.0])
    at = rng.uniform(0, 0.4)
    while at < len(out) / RATE - 0.5:
        m = samples(rng.uniform(0.8, 1.6))
        x = _voice(
            rng, flutter * (1 + wander(rng, m, 4, 0.08)), tract, jitter=0.08,
            breath=rng.uniform(0.2, 1), tilt=400, growl=0.5,
        )  # fmt: skip
        add(out, x * hull(m, 0.3, 0.2), at)
        at += m / RATE + rng.uniform(0.1, 0.4)
        m = samples(rng.uniform(0.6, 1.2))
        blow = filtered(noise(rng, m, 3), peak(rng.uniform(400, 1500), 800))
        add(out, blow * hull(m, 0.3, 0.3), at, rng.uniform(0.02, 0.3))
        at += m / RATE + rng.uniform(0.2, 0.8)
    return out


def sneeze(rng: Rng) -> Audio:
    """Ah - tchoo: a voiced gasp, then a hissing explosion with a voiced end."""
    scale = rng.uniform(0.95, 1.3)
    a, b = samples(rng.uniform(0.25, 0.6)), samples(rng.uniform(0.3, 0.55))
    f0 = log_uniform(rng, 120, 300)
    gasp = _voice(rng, f0 * line(a, (0, 1), (1, 1.5)), scale * _VOWELS[0], breath=1.0, tilt=600)
    hiss = noise(rng, b, -2) * decay(b, rng.uniform(0.25, 0.5), 0.006)
    hiss = filtered(hiss, shelf((rng.uniform(2500, 5000), 3000, 1), floor=0.2))
    voice = _voice(rng, f0 * line(b, (0, 1.8), (1, 1)), scale * _VOWELS[4], breath=0.3, tilt=800)
    blow = hiss / np.abs(hiss).max() + 0.12 * voice * line(b, (0, 0), (0.2, 1), (1, 0))
    pause = np.zeros(samples(rng.uniform(0.02, 0.25)))
    return np.concatenate([0.06 * gasp * hull(a, 0.1, 0.05), pause, blow * hull(b, 0.003, 0.1)])


def laughter(rng: Rng) -> Audio:
    """Ha-ha-ha in bouts of falling pitch."""
    out = np.zeros(samples(rng.uniform(1.2, 3.5)))
    f0 = log_uniform(rng, 95, 260)
    scale = 1 + 0.15 * (f0 > 160)
    vowel = scale * _VOWELS[int(rng.choice([0, 1, 5, 6]))]
    rate = rng.uniform(0.16, 0.26)
    at = rng.uniform(0, 0.1)
    while at < len(out) / RATE - rate:
        count = int(rng.integers(3, 9))
        for i in range(count):
            m = samples(rate * rng.uniform(0.9, 1.05))
            pitch = f0 * (1.3 - 0.5 * i / count) * line(m, (0, 1), (0.4, 1.1), (1, 0.9))
            x = _voice(rng, pitch, vowel, jitter=0.01, breath=rng.uniform(0.2, 0.6), tilt=900)
            h = formants(noise(rng, m), np.broadcast_to(vowel, (m, 3)), (200, 300, 400)) * 0.2
            voiced = line(m, (0, 0), (0.4, 0), (0.5, 1), (0.75, 0.7), (0.9, 0))
            add(out, x * voiced + h * (1 - voiced) * hull(m, 0.02, 0.02), at, 1 - 0.4 * i / count)
            at += m / RATE
        at += rng.uniform(0.2, 0.6)
    return out


def _talk(rng: Rng, n: int) -> Audio:
    """Speech-like babble of one voice: syllables, formant glides, fricatives, pauses, melody."""
    woman = rng.random() < 0.5
    f0 = log_uniform(rng, 165, 250) if woman else log_uniform(rng, 85, 150)
    scale = rng.uniform(1.08, 1.2) if woman else rng.uniform(0.95, 1.05)
    count = max(2, int(n / RATE * rng.uniform(3.5, 6)))
    grid = np.linspace(0, 1, count)
    targets = scale * _VOWELS[rng.integers(0, len(_VOWELS), count)]
    x = np.linspace(0, 1, n)
    tract = np.stack([np.interp(x, grid, targets[:, k]) for k in range(3)], axis=1)
    pitch = f0 * np.exp(wander(rng, n, 2.5, 0.12))
    voiced = _voice(rng, pitch, tract, jitter=0.008, breath=0.05, tilt=600)
    level = np.clip(
        np.interp(x, np.linspace(0, 1, 3 * count), rng.uniform(-0.3, 1, 3 * count)), 0, 1
    )
    phrases = np.clip(wander(rng, n, 1.2, 1.5) + 1.2, 0, 1)
    hiss = filtered(noise(rng, n), high_pass(2500), peak(rng.uniform(3500, 6500), 3000))
    s = np.clip(wander(rng, n, 10, 1.0) - 1.1, 0, 1) * 0.4
    return (voiced * level + hiss * s) * phrases


def chatter(rng: Rng) -> Audio:
    """Three to eight people talking across each other in a room."""
    n = samples(rng.uniform(2.5, 4.5))
    voices = int(rng.integers(3, 7))
    out = sum(_talk(rng, n) * log_uniform(rng, 0.2, 1) for _ in range(voices))
    return out * hull(n, 0.1, 0.1)
