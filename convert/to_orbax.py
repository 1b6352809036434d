"""Any model on disk -> Orbax checkpoint."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import ml_dtypes
import numpy as np

from ai_jax.convert import mapping, orbax
from ai_jax.convert.files import INFO, Summary, progress, whole_folder, write_info
from ai_jax.convert.source import Source
from ai_jax.errors import UserError

DTYPES = ("float32", "float16", "bfloat16")


def write(
    source: Source,
    out: str | Path,
    *,
    dtype: str | None = None,
    skip: Iterable[str] = (),
    allow_nan: bool = False,
    overwrite: bool = False,
) -> Summary:
    """Write ``source`` as the Orbax checkpoint ``out``, with all that travels along.

    dtype: cast the tensors that the model runs; None keeps the bits of all. skip: parts to leave
    behind, of ``mapping.PARTS``. Both are recorded in the checkpoint. Raises UserError for a tensor
    with a NaN unless ``allow_nan``, or if ``out`` exists and ``overwrite`` is off.
    """
    start = time.monotonic()
    skip = sorted(set(skip))
    left = [beginning for part in skip for beginning in mapping.PARTS[part]]
    runs = {*source.params, mapping.HEAD}  # a head that is tied remains the embedding's copy
    specs = {
        name: spec if dtype is None or name not in runs else spec.cast(dtype)
        for name, spec in source.specs.items()
        if not name.startswith(tuple(left))
    }
    parts = {"params": {name: specs[name] for name in source.params}}
    carried = {name: specs[name] for name in source.carried if name in specs}
    if carried:
        parts["carried"] = carried
    size = sum(spec.nbytes for spec in specs.values())
    how = {"form": source.kind, "prefix": source.prefix, "skipped": skip, "dtype": dtype}

    def on_block(name: str, block: np.ndarray) -> None:
        if not allow_nan and has_nan(block):
            raise UserError(
                f"{source.path}: the tensor '{name}' holds NaN; download it again, or pass "
                "--allow-nan to keep it"
            )
        advance(block.nbytes)

    with (
        whole_folder(out, overwrite=overwrite, source=source.path, size=size) as folder,
        progress(f"Writing {Path(out).name}", size) as advance,
    ):
        orbax.write(folder, parts, source.fetch, how, on_block)
        if source.info is not None:
            shutil.copyfile(source.info, folder / INFO)
        else:
            write_info(folder / INFO, source.config, dict(source.provenance))
        (folder / orbax.SIDE).mkdir()
        for name, path in source.files.items():
            shutil.copyfile(path, folder / orbax.SIDE / name)
        if source.layout is not None:
            orbax.write_layout(folder, source.layout)
    return Summary(len(specs), size, time.monotonic() - start)


# The bits of infinity, of each floating-point dtype.
_INFINITY = {
    np.dtype(name): int(np.array(np.inf, name).view(f"i{size}"))
    for name, size in (("float16", 2), (ml_dtypes.bfloat16, 2), ("float32", 4), ("float64", 8))
}


def has_nan(block: np.ndarray) -> bool:
    """Whether a contiguous floating-point array holds a NaN.

    Read as integers, NaNs are what lies beyond the infinities, and a maximum over integers is much
    faster than ``isnan``.
    """
    infinity = _INFINITY.get(block.dtype)
    if infinity is None or not block.size:
        return False
    sign = 1 << (8 * block.itemsize - 1)
    positive = int(block.view(f"i{block.itemsize}").max()) > infinity
    return positive or int(block.view(f"u{block.itemsize}").max()) > sign + infinity
