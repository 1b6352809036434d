"""The arrays of a checkpoint as we write them: Zarr 3 in one OCDBT database, each in one piece.

That is a format of Orbax, and one whose arrays can be used where they lie, as views of the mapped
file, from which the kernel copies.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ai_jax.convert import ocdbt, shards
from ai_jax.convert.mapped import MappedFile, let_go

_BLOCK_BYTES = 64 << 20


def write(
    folder: Path,
    specs: Mapping[str, shards.Spec],
    tensors: Iterable[tuple[str, np.ndarray]],
    on_block: Callable[[str, np.ndarray], None],
) -> None:
    """Write arrays into a new database, a block of rows at a time.

    tensors: those of ``specs`` in its order; they are cast to the dtypes there. on_block: called
    with the name and each block before it is written; may raise to stop.
    """
    with ocdbt.Writer(folder) as database:
        for (want, spec), (name, tensor) in zip(specs.items(), tensors, strict=True):
            if name != want or tensor.shape != spec.shape:
                raise RuntimeError(f"asked for {want} {spec}, got {name} {tensor.shape}")
            rows = _rows(spec)
            database.put(_description(name), json.dumps(_zarr3(spec, rows)).encode())
            for i in range(_blocks(spec, rows)):
                part = tensor[i * rows : (i + 1) * rows] if spec.shape else tensor
                block = shards.cast(name, part, spec.dtype)
                on_block(name, block)
                padding = bytes(_block_bytes(spec, rows) - block.nbytes)
                database.put(_block(name, spec, i), block, padding)
                let_go(tensor)


def views(folder: Path, names: Iterable[str]) -> dict[str, np.ndarray] | None:
    """The arrays of a database as read-only views of its file, unless it is not as we write one."""
    places = ocdbt.places(folder)
    if places is None:
        return None
    try:
        file = MappedFile.open(folder / ocdbt.DATA)
        return {name: _view(file, places, name) for name in names}
    except (OSError, LookupError, ValueError, TypeError, AttributeError):
        return None


def _view(file: MappedFile, places: Mapping[str, tuple[int, int]], name: str) -> np.ndarray:
    """One array; any of several errors unless all that ``write`` would have put there is there."""
    start, size = places[_description(name)]
    text = os.pread(file.descriptor, size, start)  # maps no pages, which would count as memory
    found = json.loads(text)
    spec = shards.Spec(tuple(found["shape"]), np.dtype(found["data_type"]))
    rows = found["chunk_grid"]["configuration"]["chunk_shape"][0] if spec.shape else 1
    if json.dumps(_zarr3(spec, rows)).encode() != text:
        raise ValueError("another description")
    size = _block_bytes(spec, rows)
    blocks = [places[_block(name, spec, i)] for i in range(_blocks(spec, rows))]
    begin = blocks[0][0] if blocks else 0
    if blocks != [(begin + i * size, size) for i in range(len(blocks))]:
        raise ValueError("not one after the other")
    return np.frombuffer(file, spec.dtype, math.prod(spec.shape), begin).reshape(spec.shape)


def _description(name: str) -> str:
    return f"{name}/zarr.json"


def _block(name: str, spec: shards.Spec, i: int) -> str:
    return "/".join([name, "c", *map(str, [i, *(0 for _ in spec.shape[1:])] if spec.shape else [])])


def _rows(spec: shards.Spec) -> int:
    """Rows of a block: a chunk on disk, read and written as one."""
    if not spec.shape or spec.nbytes <= _BLOCK_BYTES:
        return max(1, spec.shape[0]) if spec.shape else 1
    return max(1, _BLOCK_BYTES * spec.shape[0] // spec.nbytes)


def _blocks(spec: shards.Spec, rows: int) -> int:
    return -(-spec.shape[0] // rows) if spec.shape else 1


def _block_bytes(spec: shards.Spec, rows: int) -> int:
    """Of a block on disk: they are all of the same size, the last one is padded."""
    return rows * math.prod(spec.shape[1:]) * spec.dtype.itemsize


def _zarr3(spec: shards.Spec, rows: int) -> dict[str, Any]:
    chunk = [max(1, n) for n in ((rows, *spec.shape[1:]) if spec.shape else ())]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(spec.shape),
        "data_type": spec.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "fill_value": False if spec.dtype == np.bool_ else 0,
    }
