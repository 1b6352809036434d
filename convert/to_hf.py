"""Orbax checkpoint (or the latest one of a training run) -> Hugging Face folder."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ai_jax.config import ModelConfig
from ai_jax.convert import hf, mapping, orbax, shards
from ai_jax.convert.files import INFO, Summary, progress, read_info, whole_folder
from ai_jax.errors import UserError


def to_hf(src: str | Path, out: str | Path, overwrite: bool = False) -> Summary:
    """Convert the checkpoint ``src`` to the Hugging Face folder ``out``.

    A checkpoint made by ``from_hf`` gives its source back: the same names, bits and files, and
    ``ai_jax.json`` besides. One that was trained here becomes a folder of its own that
    ``transformers`` loads. Tensors keep their dtype either way. Raises UserError if ``src`` is no
    checkpoint, or ``out`` exists and ``overwrite`` is off.
    """
    src = Path(src)
    checkpoint = orbax.find(src) if src.is_dir() else None
    if checkpoint is None:
        raise UserError(f"{src} is neither an Orbax checkpoint nor a training run with one")
    config, provenance = read_info(checkpoint.info())
    specs = orbax.specs(checkpoint)
    noted = orbax.custom_metadata(checkpoint)
    if noted.get("source") == "hf":
        return _give_back(checkpoint, specs, noted["prefix"], out, overwrite)

    return hf.write_trained(
        config,
        specs,
        lambda names: orbax.read(checkpoint, "params", names, specs),
        out,
        tokenizer_path=checkpoint.beside(f"{orbax.SIDE}/{hf.TOKENIZER}"),
        card=_card(config, checkpoint),
        provenance=provenance,
        overwrite=overwrite,
        source=checkpoint.path,
    )


def _give_back(
    checkpoint: orbax.Checkpoint,
    params: dict[str, shards.Spec],
    prefix: str,
    out: str | Path,
    overwrite: bool,
) -> Summary:
    """Undo ``from_hf``."""
    start = time.monotonic()
    carried = orbax.specs(checkpoint, "carried")
    ours = {mapping.to_hf(name, prefix): name for name in params}
    specs = {name: params[ours[name]] for name in ours} | carried
    size = sum(spec.nbytes for spec in specs.values())
    side = checkpoint.path / orbax.SIDE

    with (
        whole_folder(out, overwrite=overwrite, source=checkpoint.path) as folder,
        progress(f"Writing {Path(out).name}", size) as advance,
    ):
        folder.mkdir()

        def read(names: list[str]) -> Iterable[tuple[str, np.ndarray]]:
            mine = [ours[name] for name in names if name in ours]
            theirs = [name for name in names if name in carried]
            params_in_order = orbax.read(checkpoint, "params", mine, params)
            carried_in_order = orbax.read(checkpoint, "carried", theirs, carried)
            for name in names:
                _, tensor = next(params_in_order if name in ours else carried_in_order)
                yield name, tensor
                advance(tensor.nbytes)

        for path in hf.side_files(side):
            shutil.copyfile(path, folder / path.name)
        shutil.copyfile(checkpoint.info(), folder / INFO)
        # Weights last: their index, if there is one, replaces the copy of the source's.
        shards.write_folder(folder, specs, read, index=shards.read_index(side))
    return Summary(len(specs), size, time.monotonic() - start)


def _card(config: ModelConfig, checkpoint: orbax.Checkpoint) -> str:
    step = "" if checkpoint.step is None else f", step {checkpoint.step}"
    seconds = config.chunk_seconds
    return (
        f"# {config.name}\n\nAn audio interaction model trained with ai-jax{step}. It hears "
        f"{seconds:g} s at a time, and after each decides whether to speak.\n\n"
        "```\nai-jax listen AUDIO --model .\n```\n"
    )
