"""Batches of freshly composed streams, by Grain.

Example i is a pure function of (seed, i): neither workers, hosts, batches nor restarts change it,
and the position in the data is one number, the examples consumed so far.

This module does not import jax, and Grain only when a loader is made (it imports
``jax.tree_util`` wherever jax is installed, in its workers too; no backend is initialised there).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np

from ai_jax.audio.mel import log_mel
from ai_jax.config import ModelConfig
from ai_jax.data.annotate import MASK, annotate
from ai_jax.data.compose import ComposeConfig, Plan, compose
from ai_jax.errors import UserError
from ai_jax.tokens import TextTokenizer

Batch = dict[str, np.ndarray]
Planner = Callable[[np.random.Generator], Plan]

# Enough for any run, and small enough for every integer type on the way.
_EXAMPLES = 2**48
# A sound belongs to a chunk that holds this much of it (or half of it, if it is shorter).
_HEARD_SECONDS = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """The training data.

    material: folder of sounds. split: which of its files. batch_size: streams of a global batch.
    chunks: length of every stream. max_tokens: tokens of every stream, padding included.
    workers: processes that compose; 0 composes in a thread of this one. prefetch: batches that
    each of them keeps ready.
    """

    material: str = ""
    split: Literal["train", "val", "test"] = "train"
    batch_size: int = 4
    chunks: int = 60
    max_tokens: int = 768
    seed: int = 0
    workers: int = 0
    prefetch: int = 2
    compose: ComposeConfig = dataclasses.field(default_factory=ComposeConfig)

    def __post_init__(self) -> None:
        for name in ("batch_size", "chunks", "max_tokens", "prefetch"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be >= 1 (got {getattr(self, name)})")
        if self.workers < 0 or self.seed < 0:
            raise UserError(f"workers and seed must be >= 0 (got {self.workers}, {self.seed})")


def make_loader(
    config: LoaderConfig,
    start_example: int = 0,
    *,
    model: ModelConfig,
    tokenizer: TextTokenizer,
    planner: Planner | None = None,
    labels: Sequence[str] | None = None,
    host: int = 0,
    hosts: int = 1,
) -> Iterator[Batch]:
    """Endless batches from the global position ``start_example`` on.

    Batch k holds the examples ``start_example + k * batch_size + [0, batch_size)``; host h of H
    gets the h-th of H equal parts of each. planner: draws what a stream is made of, by default the
    nano model's from ``config.material``; it must pickle when there are workers. labels: the
    columns of ``event_target``, by default the nano model's.

    Yields dicts of arrays (b = batch_size / hosts): tokens, stream_target, lm_target int32
    [b, max_tokens], targets -1 where masked; mel float32 [b, chunks, frames, mels]; event_target
    float32 [b, chunks, labels], 1 where a sound is heard. The iterator's ``close()`` ends its
    workers. Raises UserError for settings that do not fit, and while iterating where a stream needs
    more than max_tokens.
    """
    if config.batch_size % hosts:
        raise UserError(f"batch_size {config.batch_size} is not divisible by {hosts} hosts")
    if start_example < 0:
        raise UserError(f"the position in the data must be >= 0 (got {start_example})")
    if planner is None:
        planner = _nano_planner(config, model)
    if labels is None:
        from ai_jax.data import nano

        labels = nano.LABELS
    example = Examples(config, model, tokenizer, planner, tuple(labels))

    import absl.flags
    import grain

    dataset = (
        grain.MapDataset.range(start_example, _EXAMPLES)
        .map(example)
        .batch(config.batch_size // hosts)
        .slice(slice(host, None, hosts))
    )
    if config.workers == 0:
        ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=config.prefetch)
        return iter(dataset.to_iter_dataset(ahead))
    if not absl.flags.FLAGS.is_parsed():
        absl.flags.FLAGS.mark_as_parsed()  # Grain reads its flags where it starts processes.
    # Workers take whole batches in turn, so their number does not change the order.
    lazy = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    processes = grain.MultiprocessingOptions(
        num_workers=config.workers, per_worker_buffer_size=config.prefetch
    )
    return iter(dataset.to_iter_dataset(lazy).mp_prefetch(processes))


class Examples:
    """``examples(i)`` is example i: a dict of arrays as in :func:`make_loader`, without b."""

    def __init__(
        self,
        config: LoaderConfig,
        model: ModelConfig,
        tokenizer: TextTokenizer,
        planner: Planner,
        labels: tuple[str, ...],
    ):
        if config.compose.chunk_samples != model.chunk_samples:
            raise UserError(
                f"compose.chunk is {config.compose.chunk} s, but the model '{model.name}' listens "
                f"in chunks of {model.chunk_seconds} s"
            )
        self.config = config
        self.model = model
        self.tokenizer = tokenizer
        self.planner = planner
        self.labels = labels

    def __call__(self, index: int) -> dict[str, np.ndarray]:
        rng = np.random.Generator(np.random.Philox(key=[self.config.seed, index]))
        chunks = self.config.chunks
        stream = compose(*self.planner(rng), rng, self.config.compose, chunks=chunks)
        mel_fm = log_mel(stream.audio, self.model.mel)
        return {
            **self._tokens(index, stream.timeline),
            "mel": mel_fm.reshape(chunks, self.model.audio.chunk_frames, -1),
            "event_target": event_target(
                stream.spans, self.labels, chunks, self.model.chunk_seconds
            ),
        }

    def _tokens(self, index: int, timeline: tuple[tuple[int, str], ...]) -> dict[str, np.ndarray]:
        format = self.model.stream.format
        annotated = annotate(
            format,
            self.tokenizer,
            self.config.chunks,
            self.model.audio.chunk_tokens,
            timeline,
            self.model.stream.instruction,
        )
        n, room = annotated.tokens.size, self.config.max_tokens
        if n > room:
            raise UserError(
                f"example {index} needs {n} tokens ({self.config.chunks} chunks, {len(timeline)} "
                f"responses), but max_tokens is {room}; raise max_tokens or lower chunks"
            )
        fills = {"tokens": format.pad, "stream_target": MASK, "lm_target": MASK}
        return {
            name: np.pad(getattr(annotated, name), (0, room - n), constant_values=fill)
            for name, fill in fills.items()
        }


def event_target(
    spans: Sequence[tuple[float, float, str]],
    labels: Sequence[str],
    chunks: int,
    chunk_seconds: float,
) -> np.ndarray:
    """float32 [chunks, labels], 1 where a sound of the label is heard during the chunk.

    Every role counts; heard is 0.1 s, or half of a sound that is shorter than 0.2 s. Labels that
    are not listed are left out.
    """
    target = np.zeros((chunks, len(labels)), np.float32)
    columns = {label: column for column, label in enumerate(labels)}
    starts = np.arange(chunks) * chunk_seconds
    for start, end, label in spans:
        if label in columns:
            overlap = np.minimum(end, starts + chunk_seconds) - np.maximum(start, starts)
            needed = min(_HEARD_SECONDS, (end - start) / 2) - 1e-9
            target[overlap >= needed, columns[label]] = 1.0
    return target


def _nano_planner(config: LoaderConfig, model: ModelConfig) -> Planner:
    if not config.material:
        raise UserError("'material' names no folder of sounds")
    from ai_jax.data import nano, sources

    material = sources.Material(config.material)
    seconds = config.chunks * model.chunk_seconds
    return functools.partial(nano.plan, material, config.split, seconds=seconds)
