"""Building blocks of the procedural sounds: oscillators, noise, filters, modes, rooms.

Everything is NumPy at 16 kHz. Filters multiply the spectrum of the whole (zero-padded) sound by an
analogue frequency response, which is causal, cheap and needs no recursion over samples.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

RATE = 16_000
Audio = NDArray[np.floating]
Rng = np.random.Generator
Response = Callable[[Audio], NDArray[np.complexfloating]]


# Lengths whose only prime factors are 2, 3 and 5, for which the FFT is fast.
_FAST = sorted(
    2**a * 3**b * 5**c
    for a in range(21)
    for b in range(13)
    for c in range(9)
    if 2**a * 3**b * 5**c <= 2**20
)


def fast_length(n: float) -> int:
    """The smallest fast FFT length that is at least ``n`` (up to 2**20 samples, 65 s)."""
    return _FAST[bisect.bisect_left(_FAST, n)]


def samples(seconds: float) -> int:
    return max(1, round(seconds * RATE))


def time(n: int) -> Audio:
    """Time of each of ``n`` samples in seconds."""
    return np.arange(n) / RATE


def log_uniform(rng: Rng, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def choose(rng: Rng, *options):
    return options[int(rng.integers(len(options)))]


# -- envelopes and slow movements -------------------------------------------------------------


def line(n: int, *points: tuple[float, float]) -> Audio:
    """Straight lines through ``points`` (position 0..1, value), ``n`` samples."""
    where, value = zip(*points, strict=True)
    return np.interp(np.linspace(0, 1, n), where, value)


def hull(n: int, attack: float, release: float) -> Audio:
    """Rises in ``attack`` seconds, stays at 1, falls in ``release`` seconds (raised cosines)."""
    t = time(n)
    up = np.clip(t / max(attack, 1e-4), 0, 1)
    down = np.clip((n / RATE - t) / max(release, 1e-4), 0, 1)
    return 0.25 * (1 - np.cos(np.pi * up)) * (1 - np.cos(np.pi * down))


def decay(n: int, t60: float, attack: float = 0.0) -> Audio:
    """Exponential fall by 60 dB in ``t60`` seconds after a linear ``attack``."""
    t = time(n)
    fall = np.exp(-6.9 * np.maximum(t - attack, 0) / t60)
    return fall * np.clip(t / attack, 0, 1) if attack else fall


def wander(rng: Rng, n: int, rate: float, depth: float = 1.0) -> Audio:
    """Smooth random curve with about ``rate`` turns a second and standard deviation ``depth``."""
    knots = max(4, int(n / RATE * rate) + 3)
    return depth * np.interp(
        np.linspace(0, knots - 1.0, n), np.arange(knots), rng.standard_normal(knots)
    )


# -- sources -----------------------------------------------------------------------------------


def sine(frequency: float | Audio, n: int, phase: float = 0.0) -> Audio:
    """Sine of constant or varying frequency (Hz)."""
    return np.sin(phase + 2 * np.pi * np.cumsum(np.broadcast_to(frequency, n)) / RATE)


def pulses(f0_n: Audio) -> Audio:
    """Band-limited pulse train: all harmonics of ``f0_n`` (Hz per sample) with equal strength.

    Closed form of the cosine series (Dirichlet kernel), so its cost does not depend on pitch.
    """
    harmonics = max(1, int(0.48 * RATE / f0_n.max()))
    half = np.pi * np.cumsum(f0_n) / RATE
    odd = 2 * harmonics + 1
    below = np.sin(half)
    peak = np.abs(below) < 1e-6
    kernel = np.where(peak, odd, np.sin(odd * half) / np.where(peak, 1.0, below))
    return (kernel - 1) / (2 * np.sqrt(harmonics))


def noise(rng: Rng, n: int, slope: float = 0.0) -> Audio:
    """Gaussian noise whose spectrum falls ``slope`` dB an octave (3 pink, 6 brown), unit RMS."""
    x = rng.standard_normal(n, np.float32)
    if slope:
        x = filtered(x, lambda f: (np.maximum(f, 30.0) / 1000.0) ** (-slope / 6.02))
    return x / (x.std() + 1e-9)


def modes(
    n: int, frequencies: Sequence[float], t60s: Sequence[float], gains: Sequence[float], rng: Rng
) -> Audio:
    """Sum of decaying sines (Hz, seconds to -60 dB, gain): the ringing of a struck body."""
    table = np.array([frequencies, t60s, gains], np.float32)
    f, t60, gain = table[:, table[0] < 0.48 * RATE][:, :, None]
    out = np.zeros(n)
    if len(f):
        m = min(n, samples(1.2 * t60.max()))
        t = np.arange(m, dtype=np.float32) / np.float32(RATE)
        phase = rng.uniform(0, 2 * np.pi, f.shape).astype(np.float32)
        ring = gain * np.sin(np.float32(2 * np.pi) * f * t + phase) * np.exp(-6.9 / t60 * t)
        out[:m] = ring.sum(axis=0)
    return out


# -- filters -----------------------------------------------------------------------------------


def filtered(x: Audio, *responses: Response) -> Audio:
    """``x`` through the product of ``responses`` (functions of frequency in Hz)."""
    size = fast_length(len(x) + 1600)
    f = np.fft.rfftfreq(size, 1 / RATE).astype(np.float32)
    spectrum = np.fft.rfft(np.asarray(x, np.float32), size)
    for response in responses:
        spectrum *= response(f)
    return np.fft.irfft(spectrum, size)[: len(x)]


def low_pass(cutoff: float, order: int = 1) -> Response:
    return lambda f: (1 + 1j * f / cutoff) ** -order


def high_pass(cutoff: float, order: int = 1) -> Response:
    return lambda f: (1 - 1j * cutoff / np.maximum(f, 1e-3)) ** -order


def peak(centre: float, bandwidth: float) -> Response:
    """Two-pole resonance with gain 1 at ``centre``."""
    return lambda f: 1 / (1 + 1j * (f * f - centre * centre) / (bandwidth * np.maximum(f, 1e-3)))


def shelf(*resonances: tuple[float, float, float], floor: float = 0.0) -> Response:
    """Sum of resonances (centre, bandwidth, gain) on a flat ``floor``: the colour of a body."""
    return lambda f: floor + sum(g * peak(c, b)(f) for c, b, g in resonances)


def formants(x: Audio, centres: Audio, bandwidths: Sequence[float], floor: float = 0.005) -> Audio:
    """Vocal tract whose resonances move: ``centres`` [len(x), k] in Hz, each with a bandwidth.

    Frames of 32 ms that overlap by half, with sine windows before and after the filter.
    """
    size, hop = 512, 256
    n = -(-len(x) // hop) * hop
    padded = np.pad(np.asarray(x, np.float32), (hop, n - len(x) + hop))
    window = np.sin(np.pi * (np.arange(size, dtype=np.float32) + 0.5) / size)
    frames = np.lib.stride_tricks.sliding_window_view(padded, size)[::hop] * window
    at = np.minimum(np.arange(len(frames)) * hop, len(x) - 1)  # the middle of each frame
    f = np.fft.rfftfreq(size, 1 / RATE).astype(np.float32)
    gain = np.full((len(frames), len(f)), floor, np.float32)
    for k, bandwidth in enumerate(bandwidths):
        centre = centres[at, k, None].astype(np.float32)
        gain += 0.5**k / (1 + ((f - centre) / (0.5 * bandwidth)) ** 2)
    shaped = np.fft.irfft(np.fft.rfft(frames, axis=1) * gain, size, axis=1) * window
    return (shaped[1:, :hop] + shaped[:-1, hop:]).ravel()[: len(x)]


# -- putting things together -------------------------------------------------------------------


def add(out: Audio, x: Audio, at: float, gain: float = 1.0) -> None:
    """Mix ``x`` into ``out`` from ``at`` seconds on; what does not fit is cut."""
    start = max(0, round(at * RATE))
    m = min(len(x), len(out) - start)
    if m > 0:
        out[start : start + m] += gain * x[:m]


def unit(x: Audio) -> Audio:
    """Scaled to peak 1 (silence stays silence)."""
    top = np.abs(x).max()
    return x / top if top > 1e-9 else x


def convolved(x: Audio, impulse: Audio) -> Audio:
    size = fast_length(len(x) + len(impulse))
    spectrum = np.fft.rfft(np.asarray(x, np.float32), size)
    spectrum *= np.fft.rfft(np.asarray(impulse, np.float32), size)
    y = np.fft.irfft(spectrum, size)
    return y[: len(x) + len(impulse) - 1]


def room(rng: Rng, x: Audio, t60: float, wet: float) -> Audio:
    """Early reflections and a tail of decaying, slowly darkening noise; longer by the tail."""
    n = samples(min(0.7 * t60, 1.5))
    bright = rng.standard_normal(n) * decay(n, 0.5 * t60)
    dark = filtered(rng.standard_normal(n), low_pass(1500)) * decay(n, t60)
    tail = (bright + 2 * dark) * np.clip(time(n) / 0.02, 0, 1)
    for _ in range(int(rng.integers(3, 9))):
        tail[int(rng.integers(min(30, n - 1), min(n, 900)))] += rng.choice([-1, 1]) * 3
    tail *= wet / np.sqrt((tail**2).sum() + 1e-9)
    tail[0] += 1
    return convolved(x, tail)


def place(rng: Rng, x: Audio, outdoors: float = 0.3) -> Audio:
    """Put a dry sound somewhere: distance, walls, room and microphone, drawn at random."""
    colour: list[Response] = []
    if rng.random() < 0.5:  # far away or behind a door: the treble goes
        colour.append(low_pass(log_uniform(rng, 1500, 7000), int(rng.integers(1, 3))))
    if rng.random() < 0.3:  # an old recording or a cheap line
        colour.append(low_pass(rng.uniform(3200, 6000), 6))
    if rng.random() < 0.4:  # a microphone with little bass
        colour.append(high_pass(log_uniform(rng, 40, 300)))
    if colour:
        x = filtered(x, *colour)
    if rng.random() < 0.7:
        if rng.random() < outdoors:
            x = room(rng, x, rng.uniform(0.4, 1.6), log_uniform(rng, 0.03, 0.4))
        else:
            x = room(rng, x, log_uniform(rng, 0.15, 0.9), log_uniform(rng, 0.1, 1.0))
    if rng.random() < 0.15:  # an overloaded recording
        x = np.tanh(rng.uniform(1.5, 4) * unit(x))
    if rng.random() < 0.5:  # the recording's own noise
        floor = 10 ** (rng.uniform(-70, -42) / 20)
        x = unit(x) + floor * noise(rng, len(x), rng.uniform(0, 6))
    return x
