"""Load a model from wherever it is: Hugging Face folder, checkpoint, training run, the package."""

from __future__ import annotations

import dataclasses
import importlib.resources
from pathlib import Path
from typing import Any

import numpy as np

from ai_jax.config import ModelConfig
from ai_jax.convert import hf, mapping, orbax, shards
from ai_jax.convert.files import INFO, read_info
from ai_jax.convert.from_hf import match
from ai_jax.errors import UserError
from ai_jax.tokens import TextTokenizer


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model: config, weights (our flat names -> NumPy arrays, torch layout) and tokenizer.

    info: ``path``, ``kind`` ("hf" or "orbax"), ``step`` (None outside a training run) and
    ``provenance``. Arrays may be read-only views of the files.
    """

    config: ModelConfig
    params: dict[str, np.ndarray]
    tokenizer: TextTokenizer
    info: dict[str, Any]


def load(path: str | Path | None = None, dtype: Any = None) -> Loaded:
    """Load the model at ``path``; None is the small model of the package.

    path: a folder in Hugging Face format, an Orbax checkpoint, or a training run (its latest
    step). dtype: of the weights; None keeps the stored one (float32 for the package's model).
    Raises UserError if there is no model, a tensor does not fit its config, or the tokenizer is
    missing.
    """
    if path is None:
        path = _packaged()
        dtype = np.float32 if dtype is None else dtype
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"there is no folder {path}; give a model folder, a checkpoint or a run")
    checkpoint = orbax.find(path)
    if checkpoint is not None:
        return _load_orbax(checkpoint, dtype)
    if (path / hf.CONFIG).exists() or any(path.glob("*.safetensors")):
        return _load_hf(path, dtype)
    raise UserError(
        f"{path} is not a model: neither a Hugging Face folder (config.json, *.safetensors), nor "
        "an Orbax checkpoint, nor a training run"
    )


def _packaged() -> Path:
    folder = Path(str(importlib.resources.files("ai_jax.assets.nano")))
    if not any(folder.glob("*.safetensors")):
        raise UserError(
            "this installation of ai-jax has no built-in model; give one with --model DIR"
        )
    return folder


def _load_hf(path: Path, dtype: Any) -> Loaded:
    config = hf.model_config(path)
    tensors = shards.open_folder(path)
    found = match(config, tensors, path)
    params = {name: _cast(tensors[found.params[name]], dtype) for name in mapping.expected(config)}
    provenance = read_info(path / INFO)[1] if (path / INFO).exists() else {}
    info = {"path": str(path), "kind": "hf", "step": None, "provenance": provenance}
    return Loaded(config, params, _tokenizer(path / hf.TOKENIZER, path), info)


def _load_orbax(checkpoint: orbax.Checkpoint, dtype: Any) -> Loaded:
    config, provenance = read_info(checkpoint.info())
    specs = orbax.specs(checkpoint)
    where = checkpoint.path
    mapping.partition(config, {name: spec.shape for name, spec in specs.items()}, where)
    tokenizer = _tokenizer(checkpoint.beside(f"{orbax.SIDE}/{hf.TOKENIZER}"), where)
    names = list(mapping.expected(config))
    tensors = orbax.read(checkpoint, "params", names, specs)
    params = {name: _cast(tensor, dtype) for name, tensor in tensors}
    info = {
        "path": str(where),
        "kind": "orbax",
        "step": checkpoint.step,
        "provenance": provenance,
    }
    return Loaded(config, params, tokenizer, info)


def _tokenizer(path: Path | None, where: Path) -> TextTokenizer:
    if path is None or not path.is_file():
        raise UserError(f"{where} has no {hf.TOKENIZER}; copy the model's tokenizer there")
    return TextTokenizer.from_file(path)


def _cast(tensor: np.ndarray, dtype: Any) -> np.ndarray:
    return tensor if dtype is None else tensor.astype(np.dtype(dtype), copy=False)
