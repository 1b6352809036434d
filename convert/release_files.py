"""Which files of a folder of the authors hold what."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ai_jax.convert import hf, pickles, shards
from ai_jax.errors import UserError

# The authors' names for the tower's file and for the folder with the config.
TOWER = "audiointeraction_ChunkwisedEncoder.pth"
OMNI = "qwen25OmniConfig"
# Before the name of a file beside the weights that would be taken for a Hugging Face folder's.
ASIDE = "release."

_DECODER = ("transformer.", "lm_head.", "audio_adapter.")
_SUFFIXES = (".safetensors", *pickles.SUFFIXES)
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")


@dataclasses.dataclass(frozen=True)
class Weights:
    """One state dict, and the files that it comes from."""

    files: tuple[Path, ...]
    wrapped: bool
    tensors: Mapping[str, np.ndarray]

    @property
    def form(self) -> str:
        return "safetensors" if self.files[0].suffix == ".safetensors" else "pt"

    @property
    def where(self) -> Path:
        return self.files[0] if len(self.files) == 1 else self.files[0].parent


def find_weights(folder: Path) -> tuple[Weights, Weights]:
    """Decoder and tower, told apart by what the files hold."""
    paths = sorted(p for p in folder.iterdir() if p.suffix in _SUFFIXES)
    if any(p.suffix == ".safetensors" for p in paths) or (folder / shards.INDEX).exists():
        _check_numbers(paths)
        shards.open_folder(folder)  # which compares the index, if there is one, with the files
    decoders, towers = [], []
    for path in paths:
        if path.suffix == ".safetensors":
            found = Weights((path,), False, shards.open_file(path))
        else:
            tensors, wrapped = pickles.open_file(path)
            found = Weights((path,), wrapped, tensors)
        if any(name.startswith(_DECODER) for name in found.tensors):
            decoders.append(found)
        elif "conv1.weight" in found.tensors:
            towers.append(found)
        else:
            first = next(iter(found.tensors), "nothing")
            raise UserError(
                f"{path} belongs to neither the decoder nor the audio tower (it holds {first}); "
                "move it out of the folder"
            )
    if not decoders:
        raise UserError(
            f"{folder} lacks the decoder: no file holds 'transformer.wte.weight'; put the authors' "
            "safetensors shards or .pt there"
        )
    if not towers:
        raise UserError(
            f"{folder} lacks the audio tower: no file holds 'conv1.weight'; put the authors' "
            f"{TOWER} there"
        )
    return _merged(decoders), _merged(towers)


def _check_numbers(paths: list[Path]) -> None:
    """Shards say how many there are, even where no index does."""
    for path in paths:
        found = _SHARD.fullmatch(path.name)
        for i in range(1, int(found[3]) + 1 if found else 1):
            shard = f"{found[1]}-{i:0{len(found[2])}d}-of-{found[3]}.safetensors"
            if not path.with_name(shard).exists():
                raise UserError(f"{path.parent}: the shard {shard} is missing; download it again")


def _merged(parts: list[Weights]) -> Weights:
    """The shards of one state dict as one."""
    first, *rest = parts
    tensors = dict(first.tensors)
    for part in rest:
        for name in part.tensors:
            if name in tensors:
                raise UserError(
                    f"{first.files[0].parent}: {first.files[0].name} and {part.files[0].name} hold "
                    f"the same model (both have '{name}'); move one out of the folder"
                )
        tensors |= part.tensors
    return Weights(tuple(p.files[0] for p in parts), first.wrapped, tensors)


def find_omni(folder: Path) -> Path | None:
    """The folder whose ``config.json`` is Qwen2.5-Omni's: this one, or one in it."""
    found = []
    for path in (folder / hf.CONFIG, *sorted(folder.glob(f"*/{hf.CONFIG}"))):
        if path.is_file():
            try:
                data = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as e:
                raise UserError(f"{path} is not readable JSON; download it again") from e
            kind = data.get("model_type") if isinstance(data, dict) else None
            if str(kind).startswith("qwen2_5_omni"):
                found.append(path.parent)
    if len(found) > 1:
        raise UserError(
            f"{found[0]} and {found[1]} both hold a config of Qwen2.5-Omni; keep the one that "
            "belongs to these weights"
        )
    return found[0] if found else None


def side_files(folder: Path, omni: Path | None) -> dict[str, Path]:
    """What lies beside the weights; files of the config's folder as ``<folder>.<name>``."""
    files = {p.name: p for p in hf.side_files(folder) if p.suffix not in _SUFFIXES}
    if hf.CONFIG in files:
        files[ASIDE + hf.CONFIG] = files.pop(hf.CONFIG)
    if omni is not None and omni != folder:
        inner = [p for p in hf.side_files(omni) if p.suffix not in _SUFFIXES]
        files |= {f"{omni.name}.{p.name}": p for p in inner}
        if hf.TOKENIZER not in files and (omni / hf.TOKENIZER).exists():
            files[hf.TOKENIZER] = omni / hf.TOKENIZER
    return files
