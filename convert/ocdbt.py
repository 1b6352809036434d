"""OCDBT, the database in which Orbax keeps arrays, written one value after the other.

TensorStore writes it too, but holds what it writes in memory until a transaction ends, and gives
its files random names and times; written here, the same values give the same bytes. The format:
https://google.github.io/tensorstore/kvstore/ocdbt/#storage-format. A database is a manifest, which
says where the root of a tree of keys is, and files of values and nodes: here one file, one node.
Of such a database it can also be told where in that file each value lies.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

import numpy as np

from ai_jax.convert.mapped import write_array

_MANIFEST = "manifest.ocdbt"
DATA = "d/values"
_MANIFEST_MAGIC, _NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE
_FRAME = 4 + 8 + 2  # bytes before a body: magic number, length, version and compression
_POLYNOMIAL = 0x82F63B78  # of CRC-32C


class Writer:
    """A new database in a folder: ``put`` its values; it is complete once the block ends well."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[str, tuple[int, int]] = {}
        (folder / DATA).parent.mkdir(parents=True)
        self._file = (folder / DATA).open("wb")

    def put(self, key: str, *pieces: bytes | np.ndarray) -> None:
        """Add a value, which is the bytes of ``pieces`` together."""
        start = self._file.tell()
        for piece in pieces:
            if isinstance(piece, np.ndarray):
                write_array(self._file, piece)
            else:
                self._file.write(piece)
        self._places[key] = start, self._file.tell() - start

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with self._file:
            if error is not None:
                return
            place, node = self._file.tell(), _node(self._places)
            self._file.write(node)
        size = sum(size for _, size in self._places.values())
        manifest = _manifest(place, len(node), keys=len(self._places), values=size)
        (self._folder / _MANIFEST).write_bytes(manifest)


def places(folder: Path) -> dict[str, tuple[int, int]] | None:
    """Where each value begins in the file ``DATA`` of a database, and how many bytes it has.

    None unless ``Writer`` wrote the database: its manifest and node must be, to the checksum, what
    comes of writing again what was read from them.
    """
    try:
        manifest = (folder / _MANIFEST).read_bytes()
        numbers, _ = _take(manifest, _FRAME + len(_config() + _files()), 9)
        place, size, keys, _, values = numbers[4:]
        if manifest != _manifest(place, size, keys=keys, values=values):
            return None
        with (folder / DATA).open("rb") as file:
            file.seek(place)
            node = file.read(size)
        found = _parse(node)
    except (OSError, LookupError, ValueError):
        return None
    return found if node == _node(found) else None


def _parse(node: bytes) -> dict[str, tuple[int, int]]:
    """The inverse of ``_node``; of anything else, anything or an IndexError or ValueError."""
    (count,), at = _take(node, _FRAME + len(b"\0" + _files()), 1)
    shared, at = _take(node, at, count - 1)
    rests, at = _take(node, at, count)
    keys = [b""]
    for same, rest in zip([0, *shared], rests, strict=True):
        keys.append(keys[-1][:same] + node[at : at + rest])
        at += rest
    sizes, at = _take(node, at, count)
    starts, _ = _take(node, at + 2 * count, count)
    found = zip(starts, sizes, strict=True)
    return dict(zip((key.decode() for key in keys[1:]), found, strict=True))


def _manifest(place: int, size: int, *, keys: int, values: int) -> bytes:
    """Its configuration, and one version of the tree, whose root is there in the file of values."""
    no_older_versions = b"\0"
    version = [1, 1, 0, 0, place, size, keys, size, values]  # the first of one, of height 0 ...
    time = bytes(8)
    body = _config() + _files() + _varints(version) + time + no_older_versions
    return _framed(_MANIFEST_MAGIC, body)


def _node(places: Mapping[str, tuple[int, int]]) -> bytes:
    """A leaf: the keys in order, each without what it shares with the one before, and places."""
    keys = sorted(key.encode() for key in places)
    found = [places[key.decode()] for key in keys]
    shared = [_common(a, b) for a, b in itertools.pairwise(keys)]
    rests = [key[n:] for key, n in zip(keys, [0, *shared], strict=True)]
    body = b"\0" + _files() + _varints([len(keys), *shared, *map(len, rests)]) + b"".join(rests)
    body += _varints(size for _, size in found)
    body += b"\1" * len(keys)  # each value is in a file, not in this node
    body += b"\0" * len(keys)  # in the first one
    body += _varints(place for place, _ in found)
    return _framed(_NODE_MAGIC, body)


def _common(a: bytes, b: bytes) -> int:
    """How many bytes two keys share at their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


def _config() -> bytes:
    head = bytes(16) + b"\0"  # an identifier, which none needs; all is in this one manifest
    return head + _varints([100, 8 << 20]) + b"\4\0"  # TensorStore's defaults; no compression


def _files() -> bytes:
    """The table of files, which has one."""
    return _varints([1, len(DATA), 0]) + DATA.encode()


def _framed(magic: int, body: bytes) -> bytes:
    length = _FRAME + len(body) + 4
    head = magic.to_bytes(4, "big") + length.to_bytes(8, "little")
    framed = head + b"\0\0" + body  # version 0, not compressed
    return framed + _crc32c(framed).to_bytes(4, "little")


def _varints(numbers: Iterable[int]) -> bytes:
    """Seven bits a byte, the lowest first; the eighth says that more follow."""
    out = bytearray()
    for n in numbers:
        while n > 127:
            out.append(n & 127 | 128)
            n >>= 7
        out.append(n)
    return bytes(out)


def _take(data: bytes, at: int, count: int) -> tuple[list[int], int]:
    """The inverse of ``_varints``: that many numbers, and where they end. Or IndexError."""
    numbers = []
    for _ in range(count):
        n = shift = 0
        while data[at] > 127:
            n, shift, at = n | (data[at] & 127) << shift, shift + 7, at + 1
        numbers.append(n | data[at] << shift)
        at += 1
    return numbers, at


def _crc32c(data: bytes) -> int:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF
