"""PyTorch's files (``.pt``, ``.pth``): views of their tensors, and writing them one by one.

Nothing in a file is ever run: its pickle is read with ``weights_only=True``.
"""

from __future__ import annotations

import pickle
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ai_jax.convert.mapped import MappedFile, let_go
from ai_jax.convert.shards import Read, Spec
from ai_jax.errors import UserError

SUFFIXES = (".pt", ".pth")
_WRAPPER = "model"  # training files keep the weights under this key, beside the optimizer's state
_DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def open_file(path: Path) -> tuple[dict[str, np.ndarray], bool]:
    """The tensors of a state dict, and whether it is wrapped as ``{"model": ...}``.

    Tensors are read-only views of the mapped file; a file in the format before torch 1.6, or packed
    by another tool than torch, is read into memory. Raises UserError if torch is missing, the file
    is damaged, holds anything that would have to be run, or something else than a state dict of
    plain tensors of floating point.
    """
    torch = _torch(path)
    data = None
    if zipfile.is_zipfile(path):
        # On the device "meta" no data is read: a storage knows where in the file its bytes are.
        state, wrapped = _state(torch, path, "meta")
        starts = {place for _, place, _ in _records(path)}
        if all(_offset(tensor) in starts for tensor in state.values()):
            data = MappedFile.open(path)
    if data is None:
        state, wrapped = _state(torch, path, "cpu")
    try:
        return {name: _view(torch, tensor, data) for name, tensor in state.items()}, wrapped
    except (ValueError, TypeError) as e:  # a tensor that reaches beyond the end of the file
        raise _damaged(path) from e


def _torch(path: Path) -> Any:
    try:
        import torch
    except ImportError as e:
        raise UserError(
            f'{path} is a PyTorch file, which takes torch: pip install "ai-jax[torch]"'
        ) from e
    return torch


def _state(torch: Any, path: Path, device: str) -> tuple[Mapping[str, Any], bool]:
    """The state dict of a file, checked, and whether it is wrapped."""
    loaded = _load(torch, path, device)
    wrapped = isinstance(loaded, Mapping) and isinstance(loaded.get(_WRAPPER), Mapping)
    state = loaded[_WRAPPER] if wrapped else loaded
    if not isinstance(state, Mapping):
        raise UserError(f"{path} holds no state dict (name -> tensor); save the model's again")
    for name, tensor in state.items():
        _check(torch, path, name, tensor)
    return state, wrapped


def _load(torch: Any, path: Path, device: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError as e:
        raise UserError(
            f"{path} holds code or objects besides tensors and will not be loaded; save the "
            "model's state dict alone"
        ) from e
    except Exception as e:  # a damaged file fails anywhere in torch's readers
        raise _damaged(path) from e


def _damaged(path: Path) -> UserError:
    return UserError(f"{path} is not a whole PyTorch file; download it again")


def _check(torch: Any, path: Path, name: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        kind = type(tensor).__name__
        raise UserError(f"{path}: '{name}' is no plain tensor but {kind}; remove it")
    if _dtype_name(tensor) not in _DTYPES:
        raise UserError(
            f"{path}: the tensor '{name}' is {_dtype_name(tensor)}; give the unquantised model, "
            "in float32, float16 or bfloat16"
        )


def _dtype_name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _offset(tensor: Any) -> int | None:
    """Where in its file the storage of a tensor on the device "meta" is, if torch knows."""
    return getattr(tensor.untyped_storage(), "_checkpoint_offset", None)


def _view(torch: Any, tensor: Any, data: MappedFile | None) -> np.ndarray:
    """The tensor as a read-only array: a view of ``data``, the mapped file, or of its memory."""
    dtype = _DTYPES[_dtype_name(tensor)]
    if data is None:
        bits = tensor.detach().view({2: torch.int16, 4: torch.int32}[dtype.itemsize])
        array = bits.numpy().view(dtype)
        array.flags.writeable = False
        return array
    place = _offset(tensor) + tensor.storage_offset() * dtype.itemsize
    strides = [stride * dtype.itemsize for stride in tensor.stride()]
    return np.ndarray(tuple(tensor.shape), dtype, data, place, strides)


def write_file(path: Path, specs: Mapping[str, Spec], read: Read, *, wrapped: bool = False) -> None:
    """Write a state dict that ``torch.load`` and ``open_file`` read; one tensor is in memory.

    read: yields the named tensors in the order asked for. wrapped: as ``{"model": ...}``. Raises
    UserError if torch is missing.
    """
    torch = _torch(path)
    # Never touched, so these take no memory; torch lays out the file without writing them.
    empty = {
        name: torch.empty(s.shape, dtype=getattr(torch, s.dtype.name)) for name, s in specs.items()
    }
    with torch.serialization.skip_data():
        torch.save({_WRAPPER: empty} if wrapped else empty, path)
    # torch numbers storages in the order in which it meets them.
    records = sorted(_records(path), key=lambda r: int(r[0].filename.rpartition("/")[2]))
    tensors = iter(read(list(specs)))
    with path.open("r+b") as f:
        for name, (record, place, entry) in zip(specs, records, strict=True):
            _, tensor = next(tensors)
            spec = Spec(tensor.shape, tensor.dtype)
            if spec != specs[name] or spec.nbytes != record.file_size:
                raise RuntimeError(f"asked for {name} {specs[name]}, got {spec}")
            content = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
            checksum = zlib.crc32(content).to_bytes(4, "little")
            # It stands in the record's own header and in the archive's directory.
            for at, what in (
                (place, content),
                (record.header_offset + 14, checksum),
                (entry + 16, checksum),
            ):
                f.seek(at)
                f.write(what)
            let_go(tensor)
            del tensor, content, what  # before the next one is read


def _records(path: Path) -> list[tuple[zipfile.ZipInfo, int, int]]:
    """The storages of a file: each with the places of its bytes and of its directory entry."""
    records = []
    with zipfile.ZipFile(path) as archive, path.open("rb") as f:
        entry = archive.start_dir
        for info in archive.infolist():
            if "/data/" in info.filename and info.compress_type == zipfile.ZIP_STORED:
                f.seek(info.header_offset + 26)
                name, extra = (int.from_bytes(f.read(2), "little") for _ in range(2))
                records.append((info, info.header_offset + 30 + name + extra, entry))
            entry += 46 + len(info.filename) + len(info.extra) + len(info.comment)
    return records
