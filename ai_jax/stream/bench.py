"""How fast a model listens, and whether a long stream stays as cheap as a short one."""

from __future__ import annotations

import dataclasses
import platform
import resource
import time

import jax
import numpy as np

from ai_jax.stream.engine import Engine
from ai_jax.stream.listen import Listener


@dataclasses.dataclass(frozen=True)
class StreamBench:
    """One run over ``chunks`` chunks of noise and tones; times are wall-clock seconds a chunk.

    first, last: medians of the first and last ``window`` chunks. grown: bytes by which the peak of
    resident memory grew after the first ``window`` chunks. compiled: programs compiled meanwhile.
    slides: how often the cache slid.
    """

    model: str
    chunks: int
    window: int
    median: float
    p90: float
    first: float
    last: float
    grown: int
    compiled: int
    slides: int
    chunk_seconds: float

    @property
    def real_time_factor(self) -> float:
        return self.median / self.chunk_seconds

    def lines(self) -> list[str]:
        """The measurement as a person reads it."""
        return [
            f"model {self.model}, {self.chunks} chunks of {self.chunk_seconds * 1000:.0f} ms, "
            f"{platform.machine()}, {jax.default_backend()}, jax {jax.__version__}",
            f"per chunk: median {self.median * 1000:.1f} ms, p90 {self.p90 * 1000:.1f} ms; "
            f"real-time factor {self.real_time_factor:.3f}",
            f"last {self.window} chunks / first {self.window}: {self.last / self.first:.2f}",
            f"peak memory grew by {self.grown / 1e6:.1f} MB after the first {self.window} chunks; "
            f"{self.compiled} programs compiled meanwhile; the cache slid {self.slides} times",
        ]


def run(engine: Engine, chunks: int, seed: int = 0, window: int = 100) -> StreamBench:
    """Listen to ``chunks`` chunks (at least ``2 * window``) of varied sound."""
    engine.warm_up()
    rng = np.random.default_rng(seed)
    listener = Listener(engine)
    size = engine.config.chunk_samples
    list(listener.push(_sound(rng, size + engine.config.mel.lookahead)))
    compiled, slides, times, memory = engine.compilations, 0, [], 0
    length = listener.session.length
    for i in range(chunks):
        sound = _sound(rng, size)
        start = time.perf_counter()
        list(listener.push(sound))
        times.append(time.perf_counter() - start)
        slides += listener.session.length < length
        length = listener.session.length
        if i + 1 == window:
            memory = _peak_memory()
    return StreamBench(
        model=engine.config.name,
        chunks=chunks,
        window=window,
        median=float(np.median(times)),
        p90=float(np.percentile(times, 90)),
        first=float(np.median(times[:window])),
        last=float(np.median(times[-window:])),
        grown=_peak_memory() - memory,
        compiled=engine.compilations - compiled,
        slides=slides,
        chunk_seconds=engine.config.chunk_seconds,
    )


def _sound(rng: np.random.Generator, size: int) -> np.ndarray:
    """A chord in noise, both of random level."""
    t = np.arange(size) / 16000
    tones = np.sin(2 * np.pi * np.outer(rng.uniform(100, 4000, 3), t)).sum(0)
    level = 10 ** rng.uniform(-3, -0.7, 2)
    return (level[0] * tones / 3 + level[1] * rng.standard_normal(size) / 3).astype(np.float32)


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
