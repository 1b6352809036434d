"""Load a model for use from wherever it is: folder, checkpoint, training run, the package."""

from __future__ import annotations

import dataclasses
import importlib.resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ai_jax.config import ModelConfig
from ai_jax.convert import orbax, shards
from ai_jax.convert.mapped import let_go
from ai_jax.convert.open import open_source
from ai_jax.convert.source import Source
from ai_jax.errors import UserError
from ai_jax.tokens import TextTokenizer

if TYPE_CHECKING:  # loading into NumPy needs no jax
    import jax
    from jax.sharding import Mesh, Sharding


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model: config, weights (our flat names -> arrays, torch layout) and tokenizer.

    NumPy arrays begin at multiples of 64 bytes: ``jax.device_put(x, may_alias=True)`` on a CPU
    takes them as they are, without a copy. info: ``path``, ``kind`` ("hf", "orbax" or "release"),
    ``step`` (None outside a training run) and ``provenance``.
    """

    config: ModelConfig
    params: dict[str, Any]
    tokenizer: TextTokenizer
    info: dict[str, Any]


def load(path: str | Path | None = None, dtype: Any = None) -> Loaded:
    """Load the model at ``path``; None is the small model of the package.

    path: whatever ``open_source`` opens. dtype: of the weights; None keeps the stored one (float32
    for the package's model). Nothing but the result is in memory, whatever the dtype. Raises
    UserError if there is no model, a tensor does not fit its config, or the tokenizer is missing.
    """
    if path is None:
        path = packaged()
        dtype = np.float32 if dtype is None else dtype
    source = open_source(path)
    tokenizer = _tokenizer(source)
    params = {}
    for name, tensor in source.fetch(list(source.params)):
        params[name] = shards.aligned(tensor, np.dtype(dtype or tensor.dtype), copy=False)
        let_go(tensor)
    return Loaded(source.config, params, tokenizer, _info(source))


def load_sharded(path: str | Path, mesh: Mesh, dtype: Any = None) -> Loaded:
    """Load the model at ``path`` straight onto ``mesh``, split as ``model.sharding`` says.

    Each process reads only the parts of its own devices, and holds no tensor whole unless it is
    whole on a device. ``params`` are ``jax.Array``. Other arguments and errors are those of
    ``load``.
    """
    from ai_jax.model.sharding import shardings

    source = open_source(path)
    tokenizer = _tokenizer(source)
    specs = {name: source.specs[name] for name in source.params}
    if dtype is not None:
        specs = {name: spec.cast(dtype) for name, spec in specs.items()}
    layout = shardings({name: spec.shape for name, spec in specs.items()}, mesh)
    if source.kind == "orbax":
        params = orbax.load_sharded(source.path, specs, layout)
    else:
        params = {
            name: _place(tensor, specs[name], layout[name])
            for name, tensor in source.fetch(list(specs))
        }
    return Loaded(source.config, params, tokenizer, _info(source))


def _place(tensor: np.ndarray, spec: shards.Spec, sharding: Sharding) -> jax.Array:
    """Put the parts of a mapped tensor on the devices of this process."""
    import jax

    def part(index: tuple[slice, ...]) -> np.ndarray:
        return shards.aligned(tensor[index], spec.dtype)

    array = jax.make_array_from_callback(spec.shape, sharding, part)
    let_go(tensor)
    return array


def _tokenizer(source: Source) -> TextTokenizer:
    if source.tokenizer is None:
        raise UserError(f"{source.path} has no tokenizer.json; copy the model's tokenizer there")
    return TextTokenizer.from_file(source.tokenizer)


def _info(source: Source) -> dict[str, Any]:
    return {
        "path": str(source.path),
        "kind": source.kind,
        "step": source.step,
        "provenance": dict(source.provenance),
    }


def packaged() -> Path:
    """Folder of the model that ships in the package. Raises UserError if it was left out."""
    folder = Path(str(importlib.resources.files("ai_jax.assets.nano")))
    if not any(folder.glob("*.safetensors")):
        raise UserError(
            "this installation of ai-jax has no built-in model; give one with --model DIR"
        )
    return folder
