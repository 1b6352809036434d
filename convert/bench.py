"""``ai-jax bench convert``: conversion beside a plain copy and what a user would run instead."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from ai_jax.convert import hf
from ai_jax.convert.bench_steps import STEPS
from ai_jax.errors import UserError

OURS = ("copy", "from-hf", "to-hf")
BLOCK = 4 << 20


@dataclasses.dataclass(frozen=True)
class Row:
    """One step: medians over the rounds, or why it did not run (``reason``).

    ratio: seconds / those of the copy. peak_bytes: resident memory, mapped files included;
    imported_bytes: the part of it that the imports took. identical: whether every file of the
    source that counts (see ``differences``) came back to the byte, else ``differing`` names those
    that did not; both are None where the step writes an Orbax checkpoint.
    """

    step: str
    seconds: float | None = None
    mb_per_s: float | None = None
    ratio: float | None = None
    peak_bytes: int | None = None
    imported_bytes: int | None = None
    written_bytes: int | None = None
    identical: bool | None = None
    differing: tuple[str, ...] | None = None
    reason: str | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    """free_bytes: on the disk of ``place``, where all was written, before the first step."""

    source: str
    bytes: int
    tensors: int
    rounds: int
    place: str
    free_bytes: int
    environment: dict[str, str]
    rows: tuple[Row, ...]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def bench(
    source: str | Path,
    *,
    out: str | Path | None = None,
    rounds: int = 1,
    ours_only: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """Copy, convert and convert back the Hugging Face folder ``source``, then let peers write it.

    Every step runs in a process of its own, after the source was read once and all that was to be
    written is on disk; its time starts after the imports and ends when its result is on disk. What
    it wrote is removed at once, except what the next one reads. out: folder on whose disk to write
    (default: the current one). A step that fails gets a row with the reason. Raises UserError if
    the source is no model or holds ``out``, or there is no room for two copies of it.
    """
    source = Path(source)
    opened = hf.open_hf(source)
    size = _size(source)
    place = Path(out or ".")
    if not place.is_dir():
        raise UserError(f"--out: {place} is not a folder; give one on the disk to measure")
    if place.resolve().is_relative_to(source.resolve()):  # the copy would copy itself without end
        raise UserError(
            f"{place.absolute()} lies inside {source.absolute()}, which is copied; choose a folder "
            "outside of it with --out"
        )
    if 2.1 * size > (free := shutil.disk_usage(place).free):
        raise UserError(
            f"the benchmark takes {2.1 * size / 1e9:,.1f} GB on the disk of {place.absolute()} and "
            f"{free / 1e9:,.1f} GB are free; make room or choose another disk with --out"
        )
    steps = [step for step in STEPS if step in OURS or not ours_only]
    results: dict[str, list[dict[str, Any]]] = {step: [] for step in steps}
    with _temporary(place) as folder:
        for i in range(rounds):
            for step, result in _round(steps, source, folder, say, f"{i + 1}/{rounds}"):
                results[step].append(result)
    return Report(
        source=str(source),
        bytes=size,
        tensors=len(opened.specs),
        rounds=rounds,
        place=str(place.absolute()),
        free_bytes=free,
        environment=_environment(),
        rows=tuple(_row(step, results, size) for step in steps),
    )


@contextlib.contextmanager
def _temporary(place: Path) -> Iterator[Path]:
    try:
        folder = tempfile.TemporaryDirectory(prefix="ai-jax-bench-", dir=place)
    except OSError as e:
        raise UserError(
            f"cannot write to {place.absolute()}: {e.strerror}; choose another folder with --out"
        ) from e
    with folder as name:
        yield Path(name)


def _round(
    steps: list[str], source: Path, folder: Path, say: Callable[[str], None], count: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    checkpoint = folder / "from-hf"
    for step in steps:
        say(f"round {count}: {step} ...")
        read = checkpoint if step == "to-hf" else source
        written = folder / step.replace(" ", "-")
        result = _measure(step, read, written) if read.exists() else {"reason": "from-hf failed"}
        if "reason" not in result:
            result["written_bytes"] = _size(written)
            if step not in ("from-hf", "default Orbax"):
                result["differing"] = differences(source, written)
        if step != "from-hf":
            shutil.rmtree(written, ignore_errors=True)
        if step == "to-hf":
            shutil.rmtree(checkpoint, ignore_errors=True)
        yield step, result


def _measure(step: str, source: Path, out: Path) -> dict[str, Any]:
    """Run one step in a process of its own; its measurements, or the reason why there are none."""
    _read(source)
    os.sync()
    command = [sys.executable, "-m", "ai_jax.convert.bench_steps", step, str(source), str(out)]
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "TRANSFORMERS_VERBOSITY": "error"},
    )
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    if done.returncode < 0:
        reason = f"killed by signal {-done.returncode}"
        return {"reason": reason + (" (out of memory?)" if done.returncode == -9 else "")}
    lines = done.stderr.strip().splitlines()
    return {"reason": lines[-1] if lines else f"exit code {done.returncode}"}


def _row(step: str, results: dict[str, list[dict[str, Any]]], size: int) -> Row:
    if failed := next((r["reason"] for r in results[step] if "reason" in r), None):
        return Row(step, reason=failed)
    seconds = statistics.median(r["seconds"] for r in results[step])
    differing = None
    if "differing" in results[step][0]:
        differing = tuple(sorted({name for r in results[step] for name in r["differing"]}))
    copies = [r["seconds"] for r in results["copy"] if "seconds" in r]
    return Row(
        step,
        seconds=seconds,
        mb_per_s=size / seconds / 1e6,
        ratio=seconds / statistics.median(copies) if copies else None,
        peak_bytes=max(r["peak_bytes"] for r in results[step]),
        imported_bytes=max(r["imported_bytes"] for r in results[step]),
        written_bytes=results[step][-1]["written_bytes"],
        identical=None if differing is None else not differing,
        differing=differing,
    )


def differences(source: Path, copy: Path) -> list[str]:
    """Files of ``source`` that are not in ``copy`` bit for bit; hidden ones and code do not count.

    Those are no part of a model, and conversion leaves them behind.
    """
    names = [path.relative_to(source) for path in _files(source)]
    names = [n for n in names if n.suffix not in (".py", ".pyc") and not _hidden(n)]
    return [str(name) for name in names if not _same(source / name, copy / name)]


def _hidden(name: Path) -> bool:
    return any(part.startswith(".") for part in name.parts)


def _same(a: Path, b: Path) -> bool:
    if not b.is_file() or a.stat().st_size != b.stat().st_size:
        return False
    with a.open("rb") as left, b.open("rb") as right:
        while block := left.read(BLOCK):
            if block != right.read(BLOCK):
                return False
    return True


def _read(folder: Path) -> None:
    for path in _files(folder):
        with path.open("rb", buffering=0) as file:
            while file.read(BLOCK):
                pass


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in _files(folder))


def _environment() -> dict[str, str]:
    processor = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as info:
            names = (line.split(":", 1)[1].strip() for line in info if "model name" in line)
            processor = next(names, processor)
    found = {
        "processor": f"{processor}, {os.cpu_count()} cores",
        "Python": platform.python_version(),
    }
    for package in ("ai-jax", "jax", "orbax-checkpoint", "safetensors", "torch", "transformers"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def table(report: Report) -> Group:
    """The report as a person reads it."""
    head = (
        f"{report.source}: {report.tensors:,} tensors, {report.bytes / 1e6:,.1f} MB, median of "
        f"{report.rounds} round{'s' * (report.rounds > 1)}\n"
        f"written to {report.place}, {report.free_bytes / 1e9:,.1f} GB free\n"
        + ", ".join(f"{key} {value}" for key, value in report.environment.items())
    )
    rows = Table()
    rows.add_column("step", no_wrap=True)
    for column in ("s", "MB/s", "x copy", "peak MB", "written MB"):
        rows.add_column(column, justify="right")
    rows.add_column("identical")
    notes = []
    for r in report.rows:
        if r.reason is not None:
            rows.add_row(r.step, *["-"] * 6)
            notes.append(f"{r.step} did not run: {r.reason}")
            continue
        rows.add_row(
            r.step,
            f"{r.seconds:,.2f}",
            f"{r.mb_per_s:,.0f}",
            "-" if r.ratio is None else f"{r.ratio:.2f}",
            f"{r.peak_bytes / 1e6:,.0f}",
            f"{r.written_bytes / 1e6:,.1f}",
            {True: "yes", False: "no", None: "-"}[r.identical],
        )
        if r.differing:
            more = f" and {len(r.differing) - 3} more" if len(r.differing) > 3 else ""
            notes.append(f"{r.step}: other or missing: {', '.join(r.differing[:3])}{more}")
    imports = [r.imported_bytes / 1e6 for r in report.rows if r.imported_bytes is not None]
    if imports:
        notes.append(
            "peak: resident memory with mapped files; imports alone take "
            f"{min(imports):,.0f} to {max(imports):,.0f} MB of it"
        )
    return Group(escape(head), rows, escape("\n".join(notes)))
