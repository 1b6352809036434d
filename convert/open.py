"""Open a model in whatever form it is on disk."""

from __future__ import annotations

from pathlib import Path

from ai_jax.convert import hf, orbax, release
from ai_jax.convert.source import Source
from ai_jax.errors import UserError


def open_source(path: str | Path) -> Source:
    """Open a Hugging Face folder, an Orbax checkpoint, a training run, or the authors' release.

    No weights are read. Of a training run, the latest step is opened. Raises UserError if there is
    no model at ``path``, or it is not whole and consistent.
    """
    path = Path(path)
    if path.is_file():
        raise UserError(f"{path} is a file; give the folder of the model, a checkpoint or a run")
    if not path.is_dir():
        raise UserError(f"there is no folder {path}; give a model folder, a checkpoint or a run")
    checkpoint = orbax.find(path)
    if checkpoint is not None:
        return orbax.open_orbax(checkpoint)
    if release.is_release(path):
        return release.open_release(path)
    if (path / hf.CONFIG).exists() or any(path.glob("*.safetensors")):
        return hf.open_hf(path)
    orbax.check_begun(path)
    raise UserError(
        f"{path} is not a model; give a Hugging Face folder (config.json, *.safetensors), an Orbax "
        "checkpoint, a training run, or a release of the authors"
    )
