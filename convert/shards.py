"""Safetensors shards: memory-mapped reading and streaming writing.

The ``safetensors`` package copies each tensor and wants a whole file in memory to write it. Views
of the mapped file, let go of after use, and writing tensor by tensor keep memory bounded.
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ai_jax.convert.mapped import MappedFile, let_go, write_array
from ai_jax.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 5_000_000_000
_ALIGNMENT = 64

# In the order of the safetensors library: a file holds its tensors by falling dtype, then by name.
_DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_ORDER = {dtype: i for i, dtype in enumerate(_CODES)}


@dataclasses.dataclass(frozen=True)
class Spec:
    """Shape and dtype of a tensor that is not in memory."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def cast(self, dtype: Any) -> Spec:
        return Spec(self.shape, np.dtype(dtype))


def open_folder(folder: Path) -> dict[str, np.ndarray]:
    """Read-only, memory-mapped views of every tensor of a folder of safetensors files.

    Reads the files that the index lists, or else every ``*.safetensors`` file. Raises UserError,
    naming the tensor, if one is in two files, is not in the file that the index promises, or its
    file is damaged.
    """
    index = read_index(folder)
    if index:
        # transformers prefers a single file to an index: a folder with both is ambiguous.
        single = {SINGLE} if (folder / SINGLE).exists() else set()
        files = sorted(set(index.values()) | single)
    else:
        files = sorted(p.name for p in folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} holds no *.safetensors file; give a folder with model weights")
    tensors: dict[str, np.ndarray] = {}
    source: dict[str, str] = {}
    for file in files:
        if not (folder / file).is_file():
            name = next(name for name, f in (index or {}).items() if f == file)
            raise UserError(
                f"{folder}: the shard {file}, which holds the tensor '{name}', is missing. "
                "Download it again"
            )
        for name, tensor in open_file(folder / file).items():
            if name in tensors:
                raise UserError(
                    f"{folder}: the tensor '{name}' is in both {source[name]} and {file}. "
                    "Delete the file that does not belong there"
                )
            tensors[name], source[name] = tensor, file
    if index is not None:
        _check_index(folder, index, source)
    return tensors


def _check_index(folder: Path, index: Mapping[str, str], source: Mapping[str, str]) -> None:
    for name, file in index.items():
        if source.get(name) != file:
            raise UserError(
                f"{folder}: {INDEX} promises the tensor '{name}' in {file}, where it is not. "
                "Download both again"
            )
    for name, file in source.items():
        if name not in index:
            raise UserError(
                f"{folder}: {file} holds the tensor '{name}', which {INDEX} does not list. "
                "Download both again"
            )


def read_index(folder: Path) -> dict[str, str] | None:
    """The index's map from tensor to file name, or None where there is no index."""
    path = folder / INDEX
    if not path.exists():
        return None
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        # Only plain file names: an index must not reach outside its folder.
        plain = all(Path(file).name == file for file in weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        plain = False
    if not plain:
        raise UserError(f"{path} is not a safetensors index; download it again")
    return weight_map


def open_file(path: Path) -> dict[str, np.ndarray]:
    """Read-only views of the tensors of one safetensors file. Raises UserError if damaged."""
    header, data = _map(path)
    tensors = {}
    places = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            code, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            if {type(n) for n in (*shape, begin, end)} != {int} or min(shape, default=0) < 0:
                raise ValueError
        except (KeyError, TypeError, ValueError) as e:
            raise _damaged(path, f"the entry of the tensor '{name}' is unreadable") from e
        if str(code) not in _DTYPES:
            raise UserError(
                f"{path}: the tensor '{name}' has the dtype {code}, which cannot be read; give the "
                "unquantised model, in float32, float16 or bfloat16"
            )
        spec = Spec(shape, _DTYPES[code])
        if not 0 <= begin <= end <= len(data) or end - begin != spec.nbytes:
            raise _damaged(path, f"the tensor '{name}' does not fit its bytes {begin} to {end}")
        tensors[name] = np.frombuffer(data[begin:end], spec.dtype).reshape(shape)
        places.append((begin, end, name))
    _check_places(path, sorted(places), len(data))
    return tensors


def _check_places(path: Path, places: list[tuple[int, int, str]], size: int) -> None:
    """The tensors lie one after the other and take up all bytes, or they could not come back."""
    at, previous = 0, ""
    for begin, end, name in [*places, (size, size, "")]:
        if begin < at:
            raise _damaged(path, f"the tensors '{previous}' and '{name}' share bytes")
        if begin > at:
            place = f"before the tensor '{name}'" if name else "at the end"
            raise _damaged(path, f"its bytes {at} to {begin}, {place}, belong to no tensor")
        at, previous = end, name


def aligned(tensor: np.ndarray, dtype: np.dtype, *, copy: bool = True) -> np.ndarray:
    """A copy in ``dtype`` at an address that TensorStore and XLA:CPU take without copying again.

    copy: False gives ``tensor`` itself where it is such already.
    """
    if not copy and tensor.dtype == dtype and tensor.ctypes.data % _ALIGNMENT == 0:
        return tensor
    size = tensor.size * dtype.itemsize
    buffer = np.empty(size + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    out = buffer[start : start + size].view(dtype).reshape(tensor.shape)
    out[...] = tensor
    return out


def cast(name: str, tensor: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """``tensor`` in ``dtype``, itself if it has it; UserError for what float16 cannot hold."""
    if tensor.dtype == dtype:
        return tensor
    with np.errstate(over="ignore"):
        out = aligned(tensor, dtype)
    infinite = np.isinf(out).sum() if dtype == np.float16 else 0
    if infinite and infinite != np.isinf(tensor).sum():
        raise UserError(
            f"the tensor '{name}' holds numbers that float16 cannot; choose bfloat16 or float32"
        )
    return out


def read_header(path: Path) -> bytes:
    """The header of a safetensors file as it is there, padding included. UserError if cut off."""
    try:
        with path.open("rb") as f:
            size = int.from_bytes(f.read(8), "little")
            header = f.read(size)
    except OSError as e:
        raise _damaged(path, e.strerror or str(e)) from e
    if len(header) < size:
        raise _damaged(path, "its header is cut off")
    return header


def _map(path: Path) -> tuple[dict[str, Any], memoryview]:
    """Header and data bytes of a safetensors file."""
    try:
        file = MappedFile.open(path)
    except (OSError, ValueError) as e:
        raise _damaged(path, getattr(e, "strerror", None) or "it is empty") from e
    file.madvise(mmap.MADV_SEQUENTIAL)
    mapped = memoryview(file)
    start = 8 + int.from_bytes(mapped[:8], "little")
    if start > len(mapped):
        raise _damaged(path, "its header is cut off")
    return _parse(path, bytes(mapped[8:start])), mapped[start:]


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except _DuplicateKeyError as e:
        raise UserError(
            f"{path}: the tensor '{e}' is there twice; write the file again, once each"
        ) from e
    except ValueError as e:
        raise _damaged(path, "its header is not JSON") from e
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a mapping")
    return header


class _DuplicateKeyError(Exception):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        keys = [k for k, _ in pairs]
        raise _DuplicateKeyError(next(k for k in keys if keys.count(k) > 1))
    return out


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(f"{path} is not a whole safetensors file: {reason}. Download it again")


Read = Callable[[list[str]], Iterable[tuple[str, np.ndarray]]]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a folder of safetensors files was laid out, to the byte: headers by file, and index."""

    headers: Mapping[str, bytes]
    index: bytes | None

    @classmethod
    def of(cls, folder: Path) -> Layout:
        """The layout of a folder that ``open_folder`` could read."""
        index = read_index(folder)
        names = index.values() if index else (p.name for p in folder.glob("*.safetensors"))
        headers = {file: read_header(folder / file) for file in sorted(set(names))}
        return cls(headers, (folder / INDEX).read_bytes() if index else None)

    def specs(self) -> dict[str, Spec]:
        """Every tensor of the layout."""
        return {name: spec for file in self.headers for name, spec in self.entries(file).items()}

    def entries(self, file: str) -> dict[str, Spec]:
        """The tensors of one file in the order of their bytes."""
        header = _parse(Path(file), self.headers[file])
        header.pop("__metadata__", None)
        rows = sorted(header.items(), key=lambda row: row[1]["data_offsets"])
        return {name: Spec(tuple(e["shape"]), _DTYPES[e["dtype"]]) for name, e in rows}


def write_folder(
    folder: Path,
    specs: Mapping[str, Spec],
    read: Read,
    *,
    like: Layout | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write ``model.safetensors``, or shards and their index where that exceeds ``shard_bytes``.

    read: yields the named tensors in the order asked for; called once per file. like: a layout to
    reproduce to the byte; it is followed if it is about exactly these tensors.
    """
    if like is not None and like.specs() == specs:
        for file, header in like.headers.items():
            _write(folder / file, header, like.entries(file), read)
        if like.index is not None:
            (folder / INDEX).write_bytes(like.index)
        return
    layout = _layout(specs, shard_bytes)
    files: dict[str, list[str]] = {}
    for name, file in layout.items():
        files.setdefault(file, []).append(name)
    for file, names in files.items():
        write_file(folder / file, {name: specs[name] for name in names}, read)
    if len(files) > 1:
        total = sum(spec.nbytes for spec in specs.values())
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(layout.items()))}
        (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_file(path: Path, specs: Mapping[str, Spec], read: Read) -> None:
    """Write one safetensors file, byte for byte as the safetensors library would."""
    names = sorted(specs, key=lambda name: (-_ORDER[specs[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        spec = specs[name]
        begin, end = end, end + spec.nbytes
        code, shape = _CODES[spec.dtype], list(spec.shape)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    _write(path, text, {name: specs[name] for name in names}, read)


def _write(path: Path, header: bytes, specs: Mapping[str, Spec], read: Read) -> None:
    """Write the tensors in the order of ``specs`` behind a header that says so."""
    with path.open("wb") as f:
        f.write(len(header).to_bytes(8, "little"))
        f.write(header)
        tensors = iter(read(list(specs)))
        for want, spec in specs.items():
            name, tensor = next(tensors)
            got = Spec(tensor.shape, tensor.dtype)
            if (name, got) != (want, spec):
                raise RuntimeError(f"asked for {want} {spec}, got {name} {got}")
            write_array(f, tensor)
            let_go(tensor)
            del tensor  # or it would be in memory beside the next one


def _layout(specs: Mapping[str, Spec], shard_bytes: int) -> dict[str, str]:
    """Fill shards in the order of names; a tensor larger than a shard has one of its own."""
    groups = group_by_bytes(sorted(specs), specs, shard_bytes)
    if len(groups) == 1:
        return dict.fromkeys(groups[0], SINGLE)
    return {
        name: f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        for i, group in enumerate(groups, 1)
        for name in group
    }


def group_by_bytes(names: Iterable[str], specs: Mapping[str, Spec], limit: int) -> list[list[str]]:
    """Split ``names`` into consecutive groups of at most ``limit`` bytes (or one tensor) each."""
    groups: list[list[str]] = [[]]
    size = 0
    for name in names:
        if groups[-1] and size + specs[name].nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += specs[name].nbytes
    return groups
