"""What every conversion shares: whole-or-nothing folders, ``ai_jax.json``, summary, progress."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ai_jax.config import ModelConfig, from_dict, to_dict
from ai_jax.errors import UserError

INFO = "ai_jax.json"
_PROBE_BYTES = 1 << 20  # Orbax writes some kilobytes


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a conversion wrote: number of tensors, their bytes, and how long it took."""

    tensors: int
    bytes: int
    seconds: float


def read_info(path: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """Model config and provenance from an ``ai_jax.json``. Raises UserError if it is invalid."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        provenance = data.pop("provenance", {})
    except (OSError, ValueError, AttributeError, TypeError) as e:
        raise UserError(f"{path} is not a readable JSON mapping; restore it") from e
    return from_dict(ModelConfig, data, where=str(path)), provenance


def write_info(path: Path, config: ModelConfig, provenance: dict[str, Any]) -> None:
    """Write ``ai_jax.json``: the model config and, under ``provenance``, where it comes from."""
    write_json(path, to_dict(config) | {"provenance": provenance})


def write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_links(folder: Path) -> None:
    """UserError if a link in ``folder`` leads nowhere, as in a cache half downloaded or copied."""
    for path in sorted(folder.iterdir()):
        if not path.exists():
            raise UserError(
                f"{path} is a link to {path.readlink()}, which is not there; download it again, or "
                "copy the folder with what its links lead to (cp -rL)"
            )


_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """Bytes of ``2GB``, ``500 MB``, ``1GiB`` ... UserError if it is no such size."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?B)\s*", text, re.IGNORECASE)
    size = float(match[1]) * _UNITS[match[2].upper()] if match else 0
    if not 1 <= size < math.inf:
        raise UserError(f"'{text}' is not a size; give one like 2GB or 500MB")
    return int(size)


@contextlib.contextmanager
def whole_folder(
    out: str | Path, *, overwrite: bool, source: Path | None = None, size: int = 0
) -> Iterator[Path]:
    """Yield a path at which to make a folder; it takes the name ``out`` only once it is complete.

    However the writing ends, ``out`` is either what it was or the whole new folder, safe on disk;
    after a kill between the two renames that replace a folder, the next run makes it so. All that
    is temporary, whoever makes it, lies in one folder beside ``out``, which the next run removes.
    Raises UserError if ``out`` exists and ``overwrite`` is off, if it is something else than a
    model folder, if it is, holds or lies inside ``source``, if there is no room for ``size`` bytes,
    or if the disk is full.
    """
    out = Path(out).absolute()
    partial = out.with_name(out.name + ".partial")
    new, old = partial / "new", partial / "old"
    _restore(out, old)
    if out.exists() or out.is_symlink():
        _check_replaceable(out, overwrite, source)
    if source is not None and out.resolve().is_relative_to(source.resolve()):
        raise UserError(f"{out} lies inside {source}, which is read; choose a folder outside of it")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # Left behind by a run that was killed.
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        _check_room(out, partial, size)
        yield new
        sync(new)
        _move_into_place(new, out, old)
    except OSError as e:
        file = f" ({e.filename})" if e.filename else ""
        raise UserError(f"cannot write {out}: {e.strerror or e}{file}") from e
    finally:
        _restore(out, old)
        shutil.rmtree(partial, ignore_errors=True)


def _check_room(out: Path, partial: Path, size: int) -> None:
    """Raises UserError if there is not as much room, OSError if not even some can be written.

    Some: quotas and limits show only so, and Orbax, which writes first, reports them in a hundred
    lines of its threads.
    """
    free = shutil.disk_usage(out.parent).free
    if size > free:
        raise UserError(
            f"there is no room for {out}: it takes {size / 1e9:,.1f} GB and {free / 1e9:,.1f} GB "
            "are free; make room or choose another disk"
        )
    probe = partial / "probe"
    probe.write_bytes(bytes(min(size, _PROBE_BYTES)))
    sync(partial)
    probe.unlink()


def sync(folder: Path) -> None:
    """Have all of a folder on disk before it takes its name."""
    for path in [folder, *folder.rglob("*")]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _move_into_place(new: Path, out: Path, old: Path) -> None:
    if out.exists():
        os.rename(out, old)
    os.rename(new, out)
    if old.exists():
        os.rename(old, new)  # half removed, it must not be taken for what ``out`` was


def _restore(out: Path, old: Path) -> None:
    """Give ``out`` back what was to be replaced, if the run ended before the new took its name."""
    if old.exists() and not out.exists():
        os.rename(old, out)


def _check_replaceable(out: Path, overwrite: bool, source: Path | None) -> None:
    if not overwrite:
        raise UserError(f"{out} exists; choose another folder or pass --overwrite")
    if source is not None and source.resolve().is_relative_to(out.resolve()):
        raise UserError(f"{out} holds the model to convert; choose another folder to write to")
    ours = any((out / name).exists() for name in (INFO, "config.json", "_CHECKPOINT_METADATA"))
    if out.is_symlink() or not out.is_dir() or not (ours or not any(out.iterdir())):
        raise UserError(f"{out} is not a model folder, so it is not replaced; choose another one")


@contextlib.contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr if that is a terminal; yields ``advance(bytes)``."""
    if not sys.stderr.isatty():
        yield lambda n: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(label, total=total)
        yield lambda n: bar.advance(task, n)
