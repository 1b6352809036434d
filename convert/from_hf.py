"""Hugging Face folder -> Orbax checkpoint."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import numpy as np

from ai_jax.convert import hf, mapping, orbax, shards
from ai_jax.convert.files import INFO, Summary, progress, whole_folder, write_info
from ai_jax.errors import UserError


def from_hf(src: str | Path, out: str | Path, overwrite: bool = False) -> Summary:
    """Convert the Hugging Face folder ``src`` to the Orbax checkpoint ``out``.

    Tensors keep their dtype and bits. Those that the model does not run (vision tower, talker,
    vocoder) are carried along, and every other file of the folder is kept under ``hf/``, so that
    ``to_hf`` gives the folder back. The weights are memory-mapped, never in memory as a whole.
    Raises UserError naming the tensor that is unmapped, missing, duplicated, of the wrong shape or
    not of floating point, or if ``out`` exists and ``overwrite`` is off.
    """
    start = time.monotonic()
    src = Path(src)
    if not src.is_dir():
        raise UserError(f"{src} is not a folder; give a folder in Hugging Face format")
    config = hf.model_config(src)
    tensors = shards.open_folder(src)
    found = match(config, tensors, src)
    parts = {"params": {ours: tensors[name] for ours, name in found.params.items()}}
    if found.carried:
        parts["carried"] = {name: tensors[name] for name in found.carried}

    with whole_folder(out, overwrite=overwrite, source=src) as folder:
        with progress(f"Writing {Path(out).name}", None):
            orbax.write(folder, parts, {"source": "hf", "prefix": found.prefix})
        if (src / INFO).exists():
            shutil.copyfile(src / INFO, folder / INFO)
        else:
            write_info(folder / INFO, config, {"source": src.resolve().name})
        (folder / orbax.SIDE).mkdir()
        for path in hf.side_files(src):
            shutil.copyfile(path, folder / orbax.SIDE / path.name)
    size = sum(tensor.nbytes for tensor in tensors.values())
    return Summary(len(tensors), size, time.monotonic() - start)


def match(config: hf.ModelConfig, tensors: dict[str, np.ndarray], where: Path) -> mapping.Partition:
    """``mapping.partition``, and the model's own tensors must be float32, float16 or bfloat16."""
    found = mapping.partition(config, {k: t.shape for k, t in tensors.items()}, where)
    for name in found.params.values():
        dtype = tensors[name].dtype
        if dtype.name not in ("float32", "float16", "bfloat16"):
            raise UserError(
                f"{where}: the tensor '{name}' is {dtype.name}; give the unquantised model, in "
                "float32, float16 or bfloat16"
            )
    return found
