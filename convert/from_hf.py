"""Hugging Face folder -> Orbax checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ai_jax.convert import hf, orbax, to_orbax
from ai_jax.convert.files import Summary
from ai_jax.errors import UserError


def from_hf(
    src: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    skip: Iterable[str] = (),
    allow_nan: bool = False,
    overwrite: bool = False,
) -> Summary:
    """Convert the Hugging Face folder ``src`` to the Orbax checkpoint ``out``.

    Tensors keep their dtype and bits. Those that the model does not run (vision tower, talker,
    vocoder) are carried along, and so are all other files of the folder and the headers of its
    shards, so that ``to_hf`` gives the folder back. The weights are never in memory as a whole.

    dtype, skip, allow_nan, overwrite: see ``to_orbax.write``. Raises UserError naming the tensor or
    file at fault, as ``hf.open_hf`` and ``to_orbax.write`` do.
    """
    src = Path(src)
    if src.is_dir() and orbax.find(src) is not None:
        raise UserError(
            f"{src} is a checkpoint already; give a folder in Hugging Face format, or use to-hf"
        )
    return to_orbax.write(
        hf.open_hf(src), out, dtype=dtype, skip=skip, allow_nan=allow_nan, overwrite=overwrite
    )
