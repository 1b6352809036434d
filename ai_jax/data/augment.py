"""Random variations of one clip: speed, colour, room, level, excerpt; and where it is audible."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ai_jax.data.sounds.dsp import RATE, fast_length, filtered, log_uniform, place

_FRAME = RATE // 50  # 20 ms


def change_speed(audio: NDArray[np.floating], speed: float) -> NDArray[np.float32]:
    """Play ``audio`` about ``speed`` times as fast; the pitch moves along.

    Resampling by FFT; the ratio is within 1 % of ``speed``, such that both lengths are fast.
    """
    n = fast_length(len(audio) + 256)
    step = 1 << max(0, int(np.log2(n / speed)) - 7)  # no prime factor above 256
    m = round(n / speed / step) * step
    spectrum = np.fft.rfft(np.asarray(audio, np.float32), n)[: m // 2 + 1]
    spectrum = np.pad(spectrum, (0, m // 2 + 1 - len(spectrum)))
    out = np.fft.irfft(spectrum, m) * np.float32(m / n)
    return out[: round(len(audio) * m / n)]


def tilt(audio: NDArray[np.floating], db_per_octave: float) -> NDArray[np.floating]:
    """Raise the treble by ``db_per_octave`` around 1 kHz (lower it if negative), 100-6400 Hz."""
    power = db_per_octave / 6.02
    return filtered(audio, lambda f: (np.clip(f, 100, 6400) / 1000) ** power)


def excerpt(
    audio: NDArray[np.floating], seconds: float, rng: np.random.Generator
) -> NDArray[np.floating]:
    """At most ``seconds`` of ``audio``, at a random place that keeps its loudest second."""
    length, n = round(seconds * RATE), len(audio)
    if n <= length:
        return audio
    second = min(RATE, length)
    energy = np.cumsum(np.square(np.append(0.0, audio)))
    loudest = int(np.argmax(energy[second:] - energy[:-second]))
    first, last = max(0, loudest + second - length), min(loudest, n - length)
    start = int(rng.integers(first, last + 1))
    return audio[start : start + length]


def active_span(audio: NDArray[np.floating], below_db: float = 30.0) -> tuple[float, float]:
    """Start and end (seconds) of what is within ``below_db`` of the loudest 20 ms of ``audio``."""
    padded = np.pad(audio, (0, -len(audio) % _FRAME)).astype(np.float64)
    power = np.square(padded).reshape(-1, _FRAME).mean(axis=1)
    loud = np.flatnonzero(power >= power.max() * 10 ** (-below_db / 10))
    end = min((loud[-1] + 1) * _FRAME, len(audio))
    return float(loud[0] * _FRAME / RATE), float(end / RATE)


def augment(
    audio: NDArray[np.floating],
    rng: np.random.Generator,
    *,
    speed: tuple[float, float] = (0.85, 1.18),
    gain_db: tuple[float, float] = (-14.0, 0.0),
    placed: bool = False,
) -> NDArray[np.float32]:
    """A random variation of ``audio`` [samples], float32, whose peak is the drawn gain.

    placed: the clip has been put into a room already, as synthesised sounds are.
    """
    if rng.random() < 0.8:
        audio = change_speed(audio, log_uniform(rng, *speed))
    if rng.random() < 0.5:
        audio = tilt(audio, rng.uniform(-3, 3))
    if not placed and rng.random() < 0.5:
        audio = place(rng, audio)
    peak = max(float(np.abs(audio).max()), 1e-9)
    return (audio * (10 ** (rng.uniform(*gain_db) / 20) / peak)).astype(np.float32)
