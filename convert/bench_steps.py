"""What ``bench`` times: each step runs alone, in a process of its own, so that its memory shows.

``python -m ai_jax.convert.bench_steps STEP SOURCE OUT`` prints one JSON object: seconds (from after
the imports until all is on disk), peak_bytes (of resident memory, mapped files included) and
imported_bytes (how much of it the imports took).
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ai_jax.convert.files import sync

Run = Callable[[Path, Path], object]


def copy() -> Run:
    """The yardstick: all files copied by the operating system's fastest way."""

    def run(source: Path, out: Path) -> None:
        shutil.copytree(source, out)
        sync(out)

    return run


def from_hf() -> Run:
    import tensorstore  # noqa: F401
    from orbax.checkpoint import v1  # noqa: F401

    from ai_jax.convert.from_hf import from_hf as run

    return run


def to_hf() -> Run:
    from ai_jax.convert.to_hf import to_hf as run

    return run


def default_orbax() -> Run:
    """All tensors read by safetensors and saved by Orbax as it comes."""
    import orbax.checkpoint as ocp
    from safetensors.numpy import load_file

    def run(source: Path, out: Path) -> None:
        tensors = {}
        for shard in sorted(source.glob("*.safetensors")):
            tensors |= load_file(shard)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(out.absolute(), tensors)
        sync(out)

    return run


def save_pretrained() -> Run:
    """transformers' ``from_pretrained``, then ``save_pretrained``."""
    import torch  # noqa: F401  # where it is missing, this says so in one line
    from transformers import (
        Qwen2_5OmniForConditionalGeneration,
        Qwen2_5OmniThinkerForConditionalGeneration,
    )

    models = {
        "qwen2_5_omni": Qwen2_5OmniForConditionalGeneration,
        "qwen2_5_omni_thinker": Qwen2_5OmniThinkerForConditionalGeneration,
    }

    def run(source: Path, out: Path) -> None:
        config = json.loads((source / "config.json").read_text())
        model = models[config["model_type"]].from_pretrained(source, dtype="auto")
        model.save_pretrained(out)
        sync(out)

    return run


# The names of the table, in the order of running: to-hf reads what from-hf wrote.
STEPS: dict[str, Callable[[], Run]] = {
    "copy": copy,
    "from-hf": from_hf,
    "to-hf": to_hf,
    "default Orbax": default_orbax,
    "save_pretrained": save_pretrained,
}


def main(step: str, source: str, out: str) -> None:
    run = STEPS[step]()
    imported = peak_memory()
    start = time.perf_counter()
    run(Path(source), Path(out))
    seconds = time.perf_counter() - start
    result = {"seconds": seconds, "peak_bytes": peak_memory(), "imported_bytes": imported}
    print(json.dumps(result))


def peak_memory() -> int:
    """Peak of this process's resident memory in bytes, mapped files included."""
    if os.path.exists("/proc/self/status"):  # getrusage may give the parent's from before exec
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line[:6] == "VmHWM:") * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    main(*sys.argv[1:])
