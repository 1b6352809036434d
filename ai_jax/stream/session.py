"""The decoder's side of one stream: the listen/speak state machine of the paper's Algorithm 3."""

from __future__ import annotations

import collections
import dataclasses
from typing import Literal

import jax

from ai_jax.stream.engine import Engine


@dataclasses.dataclass(frozen=True)
class Emission:
    """One token that the decoder emitted.

    kind: ``silent`` and ``response`` are decisions about ``chunk`` (with their probability),
    ``text`` is a piece of a reply (``text`` may be empty while a character is unfinished),
    ``eos`` ends a reply. token: its id. emotion: the tag, in formats that have one.
    """

    kind: Literal["silent", "response", "text", "eos"]
    chunk: int
    token: int
    p_response: float | None = None
    text: str = ""
    emotion: str | None = None


class Session:
    """One listener. ``hear`` queues encoded chunks, ``step`` emits one token or None when idle.

    The state is Algorithm 3's: a queue Q, the last token r*, a cache C. At an interruption point
    (r* is ``<silent>`` or ``<eos>``) ``step`` drains the queue into the cache and emits one control
    token; inside a reply it emits the next token and leaves the queue alone.

    A stream may run for ever: before a chunk that would not leave room for a reply, the oldest
    chunks go (with their decisions and replies), the prefix stays, and positions start over behind
    it, so that they stay in the range seen in training.
    """

    def __init__(self, engine: Engine, *, threshold: float | None = None):
        """``threshold`` overrides the model's own (see ``StreamConfig``)."""
        self._engine = engine
        stream = engine.config.stream
        self._format = stream.format
        self._threshold = stream.threshold if threshold is None else threshold
        self._queue: collections.deque[jax.Array] = collections.deque()
        self._last: int | None = None  # r*: emitted, but not yet in the cache
        self._speaking = False
        self._reply_tokens = 0
        self._heard = 0  # chunks in the cache
        self._cache = engine.new_cache()
        self._prefix = len(engine.prefix)
        self._length = 0  # tokens in the cache
        self._kept: collections.deque[int] = collections.deque()  # tokens of each chunk kept
        for start in range(0, self._prefix, engine.block):
            self._extend(engine.prefix[start : start + engine.block])

    @property
    def length(self) -> int:
        """Tokens in the cache: also the next position."""
        return self._length

    @property
    def speaking(self) -> bool:
        return self._speaking

    def hear(self, audio_nd: jax.Array) -> None:
        """Queue one encoded chunk [n, d] (see ``Engine.encode``)."""
        self._queue.append(audio_nd)

    def step(self) -> Emission | None:
        """Emit the next token; None if there is nothing to answer to yet."""
        if self._speaking:
            return self._speak()
        if not self._queue:
            return None
        return self._decide()

    def _decide(self) -> Emission:
        while self._queue:
            self._make_room()
            before = self._length
            pending = [] if self._last is None else [self._last]
            prediction = self._extend([*pending, *self._engine.chunk_tokens], self._queue.popleft())
            self._last = None
            if pending and self._kept:
                self._kept[-1] += 1
                before += 1
            self._kept.append(self._length - before)
            self._heard += 1
        chunk = self._heard - 1
        respond = prediction.p_response >= self._threshold
        self._last = self._format.response if respond else self._format.silent
        if respond:
            self._speaking, self._reply_tokens = True, 0
            self._text = self._engine.tokenizer.stream()
        kind = "response" if respond else "silent"
        return Emission(kind, chunk, self._last, prediction.p_response)

    def _speak(self) -> Emission:
        token = self._extend([self._last]).text
        self._kept[-1] += 1
        if self._reply_tokens == self._engine.config.stream.max_reply_tokens:
            token = self._format.eos
        self._last = token
        chunk = self._heard - 1
        if token == self._format.eos:
            self._speaking = False
            return Emission("eos", chunk, token, text=self._text.flush())
        self._reply_tokens += 1
        emotion = self._format.emotion(token) if self._reply_tokens == 1 else None
        text = "" if emotion else self._text.push(token)
        return Emission("text", chunk, token, text=text, emotion=emotion)

    def _extend(self, tokens, audio_nd=None):
        prediction, self._cache = self._engine.extend(self._cache, tokens, audio_nd)
        self._length += len(tokens)
        return prediction

    def _make_room(self) -> None:
        """Drop the oldest chunks where a chunk and the longest reply would not fit any more.

        A quarter of the window goes at once: the cost of a slide is spread over many chunks.
        """
        stream = self._engine.config.stream
        need = self._engine.block + stream.max_reply_tokens + 1
        if self._length + need <= stream.max_len:
            return
        target = min(stream.max_len - need, stream.max_len * 3 // 4)
        drop = 0
        while self._kept and self._length - drop > target:
            drop += self._kept.popleft()
        self._cache = self._engine.slide(self._cache, self._prefix, drop)
        self._length -= drop
