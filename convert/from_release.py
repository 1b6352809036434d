"""The authors' release -> Orbax checkpoint."""

from __future__ import annotations

from pathlib import Path

from ai_jax.convert import to_orbax
from ai_jax.convert.files import Summary
from ai_jax.convert.release import open_release


def from_release(
    src: str | Path,
    out: str | Path,
    *,
    fp16_positions: bool = False,
    dtype: str | None = None,
    allow_nan: bool = False,
    overwrite: bool = False,
) -> Summary:
    """Convert the authors' release folder ``src`` to the Orbax checkpoint ``out``.

    Tensors keep their dtype and bits; fused ones are taken apart. Files beside the weights come
    along, and the checkpoint notes the layout, so that ``to_release`` gives the folder back. The
    weights are never in memory as a whole, but for ``.pt`` files older than torch 1.6.

    fp16_positions: round positions as the authors' code does (see ``TextConfig``). dtype,
    allow_nan, overwrite: see ``to_orbax.write``. Raises UserError as that and ``open_release`` do.
    """
    source = open_release(src, fp16_positions=fp16_positions)
    return to_orbax.write(source, out, dtype=dtype, allow_nan=allow_nan, overwrite=overwrite)
