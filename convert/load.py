"""Load a model for use from wherever it is: folder, checkpoint, training run, the package."""

from __future__ import annotations

import dataclasses
import importlib.resources
from pathlib import Path
from typing import Any

import numpy as np

from ai_jax.config import ModelConfig
from ai_jax.convert import shards
from ai_jax.convert.open import open_source
from ai_jax.errors import UserError
from ai_jax.tokens import TextTokenizer


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model: config, weights (our flat names -> NumPy arrays, torch layout) and tokenizer.

    Arrays begin at multiples of 64 bytes: ``jax.device_put(x, may_alias=True)`` on a CPU takes
    them as they are, without a copy. info: ``path``, ``kind`` ("hf", "orbax" or "release"),
    ``step`` (None outside a training run) and ``provenance``.
    """

    config: ModelConfig
    params: dict[str, np.ndarray]
    tokenizer: TextTokenizer
    info: dict[str, Any]


def load(path: str | Path | None = None, dtype: Any = None) -> Loaded:
    """Load the model at ``path``; None is the small model of the package.

    path: whatever ``open_source`` opens. dtype: of the weights; None keeps the stored one (float32
    for the package's model). Nothing but the result is in memory, whatever the dtype. Raises
    UserError if there is no model, a tensor does not fit its config, or the tokenizer is missing.
    """
    if path is None:
        path = _packaged()
        dtype = np.float32 if dtype is None else dtype
    source = open_source(path)
    if source.tokenizer is None:
        raise UserError(f"{path} has no tokenizer.json; copy the model's tokenizer there")
    params = {}
    for name, tensor in source.fetch(list(source.params)):
        params[name] = shards.aligned(tensor, np.dtype(dtype or tensor.dtype), copy=False)
        shards.let_go(tensor)
    info = {
        "path": str(source.path),
        "kind": source.kind,
        "step": source.step,
        "provenance": dict(source.provenance),
    }
    return Loaded(source.config, params, TextTokenizer.from_file(source.tokenizer), info)


def _packaged() -> Path:
    folder = Path(str(importlib.resources.files("ai_jax.assets.nano")))
    if not any(folder.glob("*.safetensors")):
        raise UserError(
            "this installation of ai-jax has no built-in model; give one with --model DIR"
        )
    return folder
