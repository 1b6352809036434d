"""A model made to listen, by our implementation or by transformers, in float32.

Both read the same tokens and the same mel frames, so that what they compute can be compared.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib.util
import sys
from collections.abc import Iterable
from typing import Literal, Protocol

import numpy as np
from rich.console import Console
from rich.progress import track

from ai_jax.config import ModelConfig
from ai_jax.convert.source import Source

Implementation = Literal["ours", "transformers"]


@dataclasses.dataclass(frozen=True)
class Clip:
    """A stream with every token given: tokens [t] and mel frames [chunks, chunk_frames, mels]."""

    name: str
    tokens: tuple[int, ...]
    mel_cfm: np.ndarray


@dataclasses.dataclass(frozen=True)
class Choice:
    """A token that greedy decoding chose in a chunk, and by how much the next best was lower."""

    chunk: int
    token: int
    margin: float


@dataclasses.dataclass(frozen=True)
class Output:
    """float32 logits [t, vocab] of each clip, and what greedy decoding chose."""

    logits: tuple[np.ndarray, ...]
    choices: tuple[Choice, ...]


class Runner(Protocol):
    """A model in memory."""

    def one_pass(self, tokens: list[int], mel_cfm: np.ndarray) -> np.ndarray:
        """float32 logits [t, vocab] at every position of a stream."""

    def read(self, tokens: list[int], mel_fm: np.ndarray | None = None) -> np.ndarray:
        """Continue the one stream that it keeps; float32 logits [vocab] after the last token."""


def has_transformers() -> bool:
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def run(
    source: Source,
    implementation: Implementation,
    clips: tuple[Clip, ...],
    mel_cfm: np.ndarray,
    reply_tokens: int,
) -> Output:
    """Load a model, run it on ``clips`` and greedily on ``mel_cfm``, and let it go again.

    mel_cfm: [chunks, chunk_frames, mels]. reply_tokens: the longest reply in the greedy stream. Of
    two models of full size in float32, an ordinary machine holds one at a time.
    """
    if implementation == "ours":
        from ai_jax.convert.run_ours import Ours as Kind
    else:
        from ai_jax.convert.run_transformers import Transformers as Kind
    try:
        model = Kind(source, stream_tokens(source.config, len(mel_cfm), reply_tokens))
        counted = functools.partial(
            track,
            description=f"Running {source.path.name} ({implementation})",
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        logits = tuple(model.one_pass(list(clip.tokens), clip.mel_cfm) for clip in counted(clips))
        return Output(logits, tuple(greedy(model, source.config, counted(mel_cfm), reply_tokens)))
    finally:
        model = None
        gc.collect()


def stream_tokens(config: ModelConfig, chunks: int, reply_tokens: int) -> int:
    """The most tokens that a greedy stream can have: each chunk decides, replies and closes."""
    fmt = config.stream.format
    return len(fmt.prefix([])) + chunks * (len(chunk_tokens(config)) + 1 + reply_tokens + 1)


def chunk_tokens(config: ModelConfig) -> list[int]:
    return config.stream.format.chunk(config.audio.chunk_tokens)


def greedy(
    model: Runner, config: ModelConfig, mel_cfm: Iterable[np.ndarray], reply_tokens: int
) -> list[Choice]:
    """Decide after each chunk and reply in up to ``reply_tokens``: always the likeliest token.

    Needs no tokenizer: inside a reply, every token is legal but those that frame the stream.
    """
    fmt = config.stream.format
    frame = {fmt.silent, fmt.response, fmt.audio, fmt.pad, *fmt.chunk_open, *fmt.chunk_close}
    decisions = np.array([fmt.silent, fmt.response])
    text = np.setdiff1d(np.arange(config.text.vocab_size), list(frame - {fmt.eos}))
    choices = []

    def choose(chunk: int, logits_v: np.ndarray, legal: np.ndarray) -> int:
        order = np.argpartition(logits_v[legal], -2)[-2:]
        second, first = order[np.argsort(logits_v[legal][order], kind="stable")]
        margin = float(logits_v[legal[first]] - logits_v[legal[second]])
        choices.append(Choice(chunk, int(legal[first]), margin))
        return choices[-1].token

    pending = fmt.prefix([])
    for chunk, mel_fm in enumerate(mel_cfm):
        logits_v = model.read([*pending, *chunk_tokens(config)], mel_fm)
        pending = [choose(chunk, logits_v, decisions)]
        if pending == [fmt.silent]:
            continue
        for _ in range(reply_tokens):
            pending = [choose(chunk, model.read(pending), text)]
            if pending == [fmt.eos]:
                break
        else:
            pending.append(fmt.eos)
    return choices
