"""Conversions in processes of their own, which tests kill, starve and measure.

They are forked from a server that has imported everything, so that each begins at once.
"""

import contextlib
import io
import multiprocessing
import os
import resource
import signal
import sys
import time
from pathlib import Path

import jax
from absl import logging

from ai_jax import cli
from ai_jax.convert import arrays, bench_steps, files, orbax
from ai_jax.convert.from_hf import from_hf
from ai_jax.convert.to_hf import to_hf

STEPS = {"from-hf": from_hf, "to-hf": to_hf}
_PATIENCE = 60

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(
    ["tensorstore", "orbax.checkpoint.v1", "rich.progress", *(m.__name__ for m in (cli, orbax))]
    + [f"ai_jax.convert.{name}" for name in ("from_hf", "to_hf", "bench_steps")]
)


class Run:
    """``job(*args, **options)``, begun in another process."""

    def __init__(self, job, *args, **options):
        self._pipe, theirs = _processes.Pipe()
        self._process = _processes.Process(target=_begin, args=(theirs, job, args, options))
        self._process.start()
        theirs.close()
        assert self._pipe.poll(_PATIENCE) and self._pipe.recv() == "ready"

    def result(self):
        """What the job returned."""
        assert self._pipe.poll(_PATIENCE)
        result = self._pipe.recv()
        assert self.end() == 0
        return result

    def kill(self):
        """Whether SIGKILL came before the end."""
        self._process.kill()
        return self.end() == -signal.SIGKILL

    def end(self):
        """The exit code."""
        self._process.join(_PATIENCE)
        return self._process.exitcode


def _begin(pipe, job, args, options):
    jax.config.update("jax_platforms", "cpu")
    pipe.send("ready")
    pipe.send(job(*args, **options))


def convert(step, src, out, overwrite):
    """How many seconds a whole conversion takes."""
    start = time.perf_counter()
    STEPS[step](src, out, overwrite=overwrite)
    return time.perf_counter() - start


def die(step, src, out, overwrite, n):
    """SIGKILL right before the ``n``-th time that a folder as a whole is made, renamed, removed."""
    partial = out.with_name(out.name + ".partial")
    folders = {str(path) for path in (out, partial, partial / "new", partial / "old")}
    left = n

    def hook(event, args):
        nonlocal left
        steps = ("os.mkdir", "os.rename", "shutil.rmtree")
        if event in steps and folders & {str(path) for path in args[:2]}:
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.addaudithook(hook)
    convert(step, src, out, overwrite)


def command(step, src, out, overwrite, *, largest_file=None, unforeseen=False):
    """Exit code and stderr of the command line.

    largest_file: in bytes; writing more fails as on a full disk. unforeseen: there is room when the
    conversion begins, as when somebody else fills the disk meanwhile.
    """
    if unforeseen:
        files._check_room = lambda *args: None
    if largest_file is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    sys.argv = ["ai-jax", "convert", step, str(src), str(out)] + ["--overwrite"] * overwrite
    with contextlib.redirect_stderr(io.StringIO()) as err:
        logging.get_absl_handler().python_handler.stream = err  # Orbax's
        try:
            cli.main()
        except SystemExit as e:
            return e.code or 0, err.getvalue()
    return 0, err.getvalue()


def memory(step, src, out, scale, in_place, **options):
    """By how many bytes a conversion raises the peak of resident memory.

    scale: of what the conversion lets itself hold. in_place: use arrays where they lie, as is the
    way with those that we wrote. options: of the conversion.
    """
    if not in_place:
        arrays.views = lambda *args: None
    arrays._BLOCK_BYTES = int(arrays._BLOCK_BYTES * scale)
    orbax._AHEAD_BYTES = int(orbax._AHEAD_BYTES * scale)
    imported = bench_steps.peak_memory()
    STEPS[step](src, out, **options)
    return bench_steps.peak_memory() - imported


def contents(folder: Path):
    """All files of a folder, None if there is none."""
    if not folder.exists():
        return None
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
