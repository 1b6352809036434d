"""Played on instruments: melodies, chords and drums in several timbres, and church bells."""

from __future__ import annotations

from functools import partial

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
    log_uniform,
    low_pass,
    modes,
    noise,
    pulses,
    samples,
    sine,
    unit,
)

_SCALES = (
    (0, 2, 4, 5, 7, 9, 11),
    (0, 2, 3, 5, 7, 8, 10),
    (0, 2, 4, 7, 9),
    (0, 3, 5, 6, 7, 10),
)
_CHORDS = ((0, 4, 7), (0, 3, 7), (0, 4, 7, 10), (0, 5, 7), (0, 7, 12))


def _plucked(rng: Rng, f: float, n: int, t60: float, damping: float) -> Audio:
    k = np.arange(1, 1 + min(16, int(0.45 * RATE / f)))
    where = rng.uniform(0.1, 0.4)  # point of the string that is plucked
    gains = np.abs(np.sin(np.pi * k * where)) / k**0.8
    return modes(n, f * k * np.sqrt(1 + 1e-4 * k * k), t60 / (1 + damping * (k - 1)), gains, rng)


def _struck(rng: Rng, f: float, n: int, t60: float, partials: tuple[float, ...]) -> Audio:
    p = np.array(partials)
    return modes(n, f * p, t60 / p**0.7, rng.uniform(0.2, 1, len(p)) / p**0.5, rng)


def _organ(rng: Rng, f: float, n: int, drawbars: Audio) -> Audio:
    x = sum(
        g * sine(f * k, n, rng.uniform(0, 6))
        for k, g in zip((0.5, 1, 2, 3, 4), drawbars, strict=True)
    )
    return x * hull(n, 0.02, 0.05)


def _sustained(rng: Rng, f: float, n: int, cutoff: float, vibrato: float, attack: float) -> Audio:
    """A bowed or blown note: rich spectrum, vibrato that sets in late, soft attack."""
    late = np.clip(np.arange(n) / RATE / 0.4, 0, 1)
    x = pulses(f * (1 + vibrato * late * sine(rng.uniform(4.5, 6.5), n)))
    x = filtered(x, low_pass(cutoff), low_pass(2 * cutoff)) + 0.003 * noise(rng, n)
    return x * hull(n, attack, 0.08)


def _instrument(rng: Rng):
    """A function (frequency, samples) -> note, with its timbre drawn once."""
    kind = choose(rng, "plucked", "plucked", "struck", "organ", "sustained", "sustained")
    if kind == "plucked":
        return partial(_plucked, rng, t60=rng.uniform(0.8, 4), damping=rng.uniform(0.1, 0.8))
    if kind == "struck":
        partials = choose(rng, (1, 4, 10), (1, 2.76, 5.4), (1, 2, 3, 4.1, 5.3, 6.6), (1, 3.9, 9.2))
        return partial(_struck, rng, t60=rng.uniform(0.4, 3), partials=partials)
    if kind == "organ":
        return partial(_organ, rng, drawbars=rng.uniform(0, 1, 5))
    return partial(
        _sustained, rng, cutoff=log_uniform(rng, 500, 2500), vibrato=rng.uniform(0, 0.012),
        attack=rng.uniform(0.02, 0.15),
    )  # fmt: skip


def _drums(rng: Rng, n: int, beat: float) -> Audio:
    out = np.zeros(n)
    m = samples(0.25)
    sweep = 45 + 120 * decay(m, 0.12)
    kick = sine(sweep, m) * decay(m, rng.uniform(0.15, 0.3))
    snare = unit(filtered(noise(rng, m), high_pass(400))) * decay(m, rng.uniform(0.1, 0.25))
    snare += 0.4 * sine(rng.uniform(160, 240), m) * decay(m, 0.1)
    hat = unit(filtered(noise(rng, m), high_pass(5000, 2))) * decay(m, rng.uniform(0.03, 0.12))
    pattern = rng.random((3, 8)) < np.array([[0.3], [0.2], [0.7]])
    pattern[0, 0] = pattern[1, 4] = True
    for step in range(int(n / RATE / (0.5 * beat)) + 1):
        for drum, hits, gain in zip((kick, snare, hat), pattern, (1.0, 0.7, 0.3), strict=True):
            if hits[step % 8]:
                add(out, drum, step * 0.5 * beat, gain * rng.uniform(0.8, 1))
    return out


def music(rng: Rng) -> Audio:
    """A melody, often over chords or drums, at a random tempo, key and instrumentation."""
    n = samples(rng.uniform(3.0, 6.0))
    beat = rng.uniform(0.28, 0.75)
    scale = np.array(choose(rng, *_SCALES))
    key = log_uniform(rng, 110, 330)
    out = np.zeros(n)
    layers = choose(
        rng, ("melody",), ("melody", "chords"), ("melody", "chords", "drums"), ("drums",)
    )
    layers = choose(rng, layers, ("chords",), ("melody", "drums"))
    if "melody" in layers:
        play, octave = _instrument(rng), choose(rng, 1, 2, 2, 4)
        at, degree = 0.0, int(rng.integers(0, len(scale)))
        while at < n / RATE:
            length = beat * choose(rng, 0.5, 0.5, 1, 1, 2)
            degree = int(np.clip(degree + rng.integers(-2, 3), 0, 2 * len(scale) - 1))
            semitones = scale[degree % len(scale)] + 12 * (degree // len(scale))
            note = play(
                octave * key * 2 ** (semitones / 12), samples(length * rng.uniform(0.9, 1.6))
            )
            add(out, note * hull(len(note), 0.0, 0.03), at, rng.uniform(0.6, 1))
            at += length
    if "chords" in layers:
        play, chords = _instrument(rng), np.zeros(n)
        for at in np.arange(0, n / RATE, beat * choose(rng, 1, 2, 2, 4)):
            root = key * 2 ** (rng.choice(scale) / 12)
            strum = rng.uniform(0, 0.03)
            for i, semitones in enumerate(choose(rng, *_CHORDS)):
                note = play(root * 2 ** (semitones / 12), samples(min(2.2 * beat, 1.5)))
                add(chords, note * hull(len(note), 0.0, 0.05), at + i * strum)
        out = unit(out) + rng.uniform(0.4, 1) * unit(chords)
    if "drums" in layers:
        out = unit(out) + rng.uniform(0.3, 1) * unit(_drums(rng, n, beat))
    return out * hull(n, 0.02, 0.2)


def church_bell(rng: Rng) -> Audio:
    """Strokes of one to three bells; a bell's partials are hum, prime, tierce, quint, nominal."""
    n = samples(rng.uniform(3.0, 6.0))
    out = np.zeros(n)
    for _ in range(int(rng.choice([1, 1, 2, 3]))):
        prime = log_uniform(rng, 180, 750)
        partials = np.array([0.5, 1.0, 1.19, 1.5, 2.0, 2.5, 2.66, 3.0, 4.0, 5.3, 6.5])
        partials = partials * (1 + rng.normal(0, 0.008, len(partials)))
        t60 = rng.uniform(2.5, 8) / partials**0.7
        gains = rng.uniform(0.2, 1, len(partials)) / partials**0.3
        interval, at = rng.uniform(0.7, 2.8), rng.uniform(0, 0.8)
        while at < n / RATE:
            ring = modes(n - samples(at) + 1, prime * partials, t60, gains, rng)
            ring = ring + 0.3 * modes(len(ring), prime * partials * 1.003, t60, gains, rng)
            strike = noise(rng, 400) * decay(400, 0.015) * rng.uniform(0, 0.6)
            add(ring, strike, 0.0)
            add(out, ring, at, rng.uniform(0.7, 1))
            at += interval * rng.uniform(0.98, 1.02)
    return out * hull(n, 0.002, 0.3)
