"""Sounds that packages keep inside other files.

Each function yields the path of a sound inside the bank and a function that reads it, so that only
sounds in use are decoded.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import soundfile
import soxr

RATE = 16000
Entry = tuple[str, Callable[[], np.ndarray]]
_SOUNDS = (".ogg", ".wav")


def decode(content: bytes) -> np.ndarray:
    """The samples of a sound file in memory, mono float32 at 16 kHz."""
    audio, rate = soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)
    return soxr.resample(audio.mean(axis=1), rate, RATE)


def archive(path: Path) -> Iterator[Entry]:
    """A ZIP archive under any name, such as ``.pk3``."""
    with zipfile.ZipFile(path) as file:
        for name in sorted(file.namelist()):
            if name.endswith(_SOUNDS):
                content = file.read(name)
                yield name, lambda content=content: decode(content)


def qt_resource(path: Path) -> Iterator[Entry]:
    """A Qt binary resource (``.rcc``) of version 2 or later."""
    data = path.read_bytes()
    magic, version, tree, payload, names = struct.unpack_from(">4sIIII", data)
    if magic != b"qres" or version < 2:
        raise ValueError(f"{path} is no Qt resource of version 2 or later")
    nodes = [0]
    for node in nodes:  # grows while it is walked
        at = tree + 22 * node
        name, flags = struct.unpack_from(">IH", data, at)
        if flags & 2:  # a folder
            count, first = struct.unpack_from(">II", data, at + 6)
            nodes.extend(range(first, first + count))
            continue
        (length,) = struct.unpack_from(">H", data, names + name)
        title = data[names + name + 6 :][: 2 * length].decode("utf-16-be")
        if title.endswith(_SOUNDS):
            (offset,) = struct.unpack_from(">I", data, at + 10)
            (size,) = struct.unpack_from(">I", data, payload + offset)
            content = data[payload + offset + 4 :][:size]
            if flags & 1:
                content = zlib.decompress(content[4:])
            yield title, lambda content=content: decode(content)


def soundfont(path: Path) -> Iterator[Entry]:
    """The samples of a SoundFont 2 bank, as recorded (loops are not repeated)."""
    data = path.read_bytes()
    smpl, shdr = data.index(b"smpl"), data.index(b"shdr")
    size = struct.unpack_from("<I", data, smpl + 4)[0]
    pcm = np.frombuffer(data, "<i2", size // 2, smpl + 8)
    for i in range(struct.unpack_from("<I", data, shdr + 4)[0] // 46):
        name, start, end, _, _, rate = struct.unpack_from("<20s5I", data, shdr + 8 + 46 * i)
        if rate:
            audio = pcm[start:end].astype(np.float32) / 32768
            title = name.split(b"\0")[0].decode("latin-1").strip()
            yield title, lambda audio=audio, rate=rate: soxr.resample(audio, rate, RATE)


def clonk_group(path: Path) -> Iterator[Entry]:
    """A packed group of OpenClonk (``.ocg``): gzip with another magic number, scrambled headers."""
    data = zlib.decompressobj(31).decompress(b"\x1f\x8b" + path.read_bytes()[2:])

    def walk(at: int, folder: str) -> Iterator[Entry]:
        head = bytearray(byte ^ 237 for byte in data[at : at + 204])
        head[0:-2:3], head[2::3] = head[2::3], head[0:-2:3]
        (count,) = struct.unpack_from("<i", head, 36)
        base = at + 204 + 316 * count
        for i in range(count):
            entry = data[at + 204 + 316 * i :][:316]
            name = folder + entry[:260].split(b"\0")[0].decode("latin-1")
            _, child, size, _, offset = struct.unpack_from("<5i", entry, 260)
            if child:
                yield from walk(base + offset, name.removesuffix(".ocg") + "/")
            elif name.endswith(_SOUNDS):
                content = data[base + offset :][:size]
                yield name, lambda content=content: decode(content)

    yield from walk(0, "")


READERS: dict[str, Callable[[Path], Iterator[Entry]]] = {
    ".pk3": archive,
    ".rcc": qt_resource,
    ".sf2": soundfont,
    ".ocg": clonk_group,
}
