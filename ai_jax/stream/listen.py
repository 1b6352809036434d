"""From samples to decisions: log-mel, encoder and session chained for one stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np

from ai_jax.audio.mel import StreamingLogMel
from ai_jax.stream.engine import Engine
from ai_jax.stream.session import Emission, Session


@dataclasses.dataclass(frozen=True)
class ChunkResult:
    """What the model made of one chunk.

    chunk: index from 0. t: seconds from the start of the stream to the end of the chunk, when it
    was decided. text: the reply, empty where the decision is ``silent``. tokens: all that was
    emitted.
    peak: largest absolute sample of the chunk.
    """

    chunk: int
    t: float
    decision: str
    p_response: float
    text: str
    tokens: tuple[int, ...]
    peak: float
    emotion: str | None = None


class Listener:
    """Feeds a stream of 16 kHz samples, in pieces of any size, to a session.

    A chunk is decided as soon as its last mel frame is complete, 2.5 ms after its last sample.
    The decoder is run to the end of each reply before the next chunk (the concurrent schedule of
    Algorithm 3 gives the same tokens wherever the decoder keeps up).
    """

    def __init__(self, engine: Engine, *, threshold: float | None = None):
        self._engine = engine
        self._session = Session(engine, threshold=threshold)
        self._mel = StreamingLogMel(engine.config.mel)
        self._frames = np.zeros((0, engine.config.mel.n_mels), np.float32)
        self._samples = 0
        self._peaks: list[float] = []

    @property
    def session(self) -> Session:
        return self._session

    def push(self, samples: np.ndarray) -> Iterator[ChunkResult]:
        """Results of the chunks that ``samples`` complete."""
        self._note_peaks(samples)
        yield from self._take(self._mel.push(samples))

    def finish(self) -> Iterator[ChunkResult]:
        """End the stream: the last chunk is filled up with silence."""
        missing = -self._samples % self._engine.config.chunk_samples
        if missing:
            yield from self.push(np.zeros(missing, np.float32))
        yield from self._take(self._mel.flush())

    def _take(self, frames: np.ndarray) -> Iterator[ChunkResult]:
        self._frames = np.concatenate([self._frames, frames])
        size = self._engine.config.audio.chunk_frames
        while len(self._frames) >= size:
            chunk, self._frames = self._frames[:size], self._frames[size:]
            self._session.hear(self._engine.encode(chunk))
            yield self._result()

    def _result(self) -> ChunkResult:
        emitted: list[Emission] = []
        while (emission := self._session.step()) is not None:
            emitted.append(emission)
        first = emitted[0]
        return ChunkResult(
            chunk=first.chunk,
            t=round((first.chunk + 1) * self._engine.config.chunk_seconds, 3),
            decision=first.kind,
            p_response=first.p_response,
            text="".join(e.text for e in emitted).strip(),
            tokens=tuple(e.token for e in emitted),
            peak=self._peaks.pop(0),
            emotion=next((e.emotion for e in emitted if e.emotion), None),
        )

    def _note_peaks(self, samples: np.ndarray) -> None:
        size = self._engine.config.chunk_samples
        start = 0
        while start < len(samples):
            into = self._samples % size
            piece = samples[start : start + size - into]
            peak = float(np.abs(piece).max())
            if into:
                self._peaks[-1] = max(self._peaks[-1], peak)
            else:
                self._peaks.append(peak)
            start += len(piece)
            self._samples += len(piece)


def listen(
    engine: Engine, blocks: Iterable[np.ndarray], *, threshold: float | None = None
) -> Iterator[ChunkResult]:
    """Decisions and replies for a whole stream given as blocks of 16 kHz float32 samples."""
    listener = Listener(engine, threshold=threshold)
    for block in blocks:
        yield from listener.push(block)
    yield from listener.finish()
