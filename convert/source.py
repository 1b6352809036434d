"""A model on disk in any of its forms, opened without reading its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ai_jax.config import ModelConfig
from ai_jax.convert.shards import Layout, Read, Spec

Kind = Literal["hf", "orbax", "release", "memory"]


@dataclasses.dataclass(frozen=True)
class Source:
    """A model, on disk (``path``) or in memory.

    specs: shape and dtype of every tensor, those that only travel along included. Names are Hugging
    Face's without ``thinker.``, whatever the form on disk. params: the names that the model runs.
    fetch: yields the named tensors in the order asked for, as read-only arrays that may be views of
    a mapped file; memory stays bounded by some 256 MiB (or one tensor) if each is let go in time.
    prefix: ``"thinker."`` where a Hugging Face folder has it. tokenizer: its ``tokenizer.json``.
    files: what lies beside the weights (configs, tokenizer, card ...), by name.
    info: its ``ai_jax.json``, if it has one on disk. layout: of the
    Hugging Face folder that it is, or was converted from. step: of a training run's checkpoint.
    conversion: how a converted checkpoint was made: ``form`` and ``prefix`` of its source, parts
    ``skipped``, ``dtype`` cast to (None: not cast).
    """

    path: Path | None
    kind: Kind
    config: ModelConfig
    specs: Mapping[str, Spec]
    params: tuple[str, ...]
    fetch: Read
    prefix: str = ""
    tokenizer: Path | None = None
    files: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    info: Path | None = None
    layout: Layout | None = None
    step: int | None = None
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    conversion: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def carried(self) -> tuple[str, ...]:
        """The names that the model does not run."""
        runs = set(self.params)
        return tuple(name for name in self.specs if name not in runs)
