"""Orbax checkpoints: which folders are some, what they hold, reading them in pieces.

Layout: the checkpointable ``params`` (our flat names), ``carried`` (tensors that only travel along,
under their Hugging Face names) if there are any, ``ai_jax.json``, and ``hf/`` with side files. A
training run is a folder of such checkpoints named by step; it may hold ``ai_jax.json`` and ``hf/``
once for all steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ai_jax.convert import shards
from ai_jax.convert.files import INFO
from ai_jax.errors import UserError

SIDE = "hf"
_MARKER = "_CHECKPOINT_METADATA"
_READ_BYTES = 256 * 1024 * 1024


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on disk; ``step`` if it is a training run's."""

    path: Path
    step: int | None = None

    def beside(self, name: str) -> Path | None:
        """The file or folder ``name`` of the checkpoint, or of its training run."""
        places = [self.path] if self.step is None else [self.path, self.path.parent]
        return next((p / name for p in places if (p / name).exists()), None)

    def info(self) -> Path:
        """Its ``ai_jax.json``; UserError if there is none."""
        path = self.beside(INFO)
        if path is None:
            raise UserError(f"{self.path} has no {INFO}; put that of the model's config beside it")
        return path


def find(path: Path) -> Checkpoint | None:
    """The checkpoint at ``path``, or the latest one of the training run there, or None."""
    if _is_checkpoint(path):
        step = int(path.name) if path.name.isdigit() else None
        return Checkpoint(path, step)
    steps = [p for p in path.iterdir() if p.name.isdigit() and _is_checkpoint(p)]
    last = max(steps, key=lambda p: int(p.name), default=None)
    return None if last is None else Checkpoint(last, int(last.name))


def _is_checkpoint(path: Path) -> bool:
    return (path / _MARKER).is_file() and (path / "params").is_dir()


def specs(checkpoint: Checkpoint, part: str = "params") -> dict[str, shards.Spec]:
    """Shape and dtype of each tensor of one part; empty if the checkpoint lacks the part."""
    if not (checkpoint.path / part).is_dir():
        return {}
    from orbax.checkpoint import v1 as ocp

    tree = ocp.metadata(checkpoint.path.resolve(), part).metadata
    return {name: shards.Spec(tuple(m.shape), np.dtype(m.dtype)) for name, m in tree.items()}


def custom_metadata(checkpoint: Checkpoint) -> dict[str, Any]:
    """What its writer noted; ``from_hf`` notes the prefix of the Hugging Face names."""
    from orbax.checkpoint import v1 as ocp

    return ocp.metadata(checkpoint.path.resolve(), "params").custom_metadata or {}


def read(
    checkpoint: Checkpoint, part: str, names: list[str], of: Mapping[str, shards.Spec]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the named tensors in order, holding at most 256 MiB (or one tensor) at a time."""
    from orbax.checkpoint import v1 as ocp

    for group in shards.group_by_bytes(names, of, _READ_BYTES) if names else []:
        # A NumPy leaf asks for a NumPy array, whatever sharding the tensor was saved with.
        wanted = {name: np.empty(of[name].shape, of[name].dtype) for name in group}
        tree = {name: wanted.get(name, ocp.PLACEHOLDER) for name in of}
        loaded = ocp.load_checkpointables(checkpoint.path.resolve(), {part: tree})[part]
        for name in group:
            # Let go of each as it is handed on: two large tensors need not be in memory together.
            yield name, loaded.pop(name)


def write(path: Path, parts: dict[str, dict[str, np.ndarray]], metadata: dict[str, Any]) -> None:
    """Write a checkpoint of NumPy arrays, which may be memory-mapped: none is copied whole."""
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    # Weights hardly compress, and the copies guard against writers that we do not have.
    context.array.saving.use_compression = False
    context.memory.deepcopy_host_arrays = False
    with context:
        ocp.save_checkpointables(path, parts, custom_metadata=metadata)
