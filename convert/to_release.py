"""Any model on disk -> a folder as the authors publish it."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ai_jax.convert import hf, litgpt, mapping, pickles, shards
from ai_jax.convert.files import INFO, Summary, progress, whole_folder, write_info, write_json
from ai_jax.convert.mapped import let_go
from ai_jax.convert.open import open_source
from ai_jax.convert.release import ADAPTER, TOWER_PREFIX
from ai_jax.convert.release_files import ASIDE, OMNI, TOWER
from ai_jax.convert.source import Source
from ai_jax.errors import UserError

Form = Literal["safetensors", "pt"]

_DECODER = "audiointeraction_LM.pt"


def to_release(
    src: str | Path,
    out: str | Path,
    *,
    qkv: litgpt.Order | None = None,
    lm: Form | None = None,
    overwrite: bool = False,
) -> Summary:
    """Convert any model to the folder ``out`` that the authors' code loads.

    It gets the decoder, the audio tower (with its ``proj``), ``model_config.yaml``, the config of
    Qwen2.5-Omni, what lay beside the weights, and ``ai_jax.json``. Tensors keep their dtype and
    bits. What came from such a folder gets its layout back; else the layout is what the authors'
    code reads: safetensors shards with an index, queries, keys and values concatenated, no adapter.
    Vision tower, talker and vocoder have no place there and stay behind. Memory: a few tensors.

    qkv: order of queries, keys and values; "grouped" is that of older files. lm: form of the
    decoder; "pt" is what the authors' training starts from. Raises UserError if ``src`` is no
    model, torch is missing (the tower is a file of PyTorch's), or ``out`` exists and ``overwrite``
    is off.
    """
    start = time.monotonic()
    source = open_source(src)
    layout = _layout(source, qkv, lm)
    names = _decoder_names(source, layout)
    decoder = {theirs: _spec(source, ours) for theirs, ours in names.items()}
    tower = {n.removeprefix(TOWER_PREFIX): source.specs[n] for n in _tower_names(source, layout)}
    size = sum(spec.nbytes for spec in (*decoder.values(), *tower.values()))

    with (
        whole_folder(out, overwrite=overwrite, source=source.path, size=size) as folder,
        progress(f"Writing {Path(out).name}", size) as advance,
    ):
        folder.mkdir()
        read = _decoder_reader(source, layout, names, advance)
        if layout.lm == "pt":
            pickles.write_file(folder / layout.lm_file, decoder, read, wrapped=layout.wrapped)
        else:
            _write_shards(folder, decoder, read, source.layout)
        write = shards.write_file if layout.tower.endswith(".safetensors") else pickles.write_file
        write(folder / layout.tower, tower, _tower_reader(source, advance))
        _write_beside(folder, source, layout)
    return Summary(len(decoder) + len(tower), size, time.monotonic() - start)


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How a folder is laid out; what ``open_release`` notes in the provenance."""

    qkv: litgpt.Order = "concatenated"
    lm: Form = "safetensors"
    lm_file: str = _DECODER
    wrapped: bool = False
    adapter: bool = False
    tower: str = TOWER
    tower_proj: bool = True
    omni: str = OMNI


def _layout(source: Source, qkv: litgpt.Order | None, lm: Form | None) -> _Layout:
    noted = source.provenance.get("release", {})
    known = {field.name for field in dataclasses.fields(_Layout)}
    layout = _Layout(**{key: value for key, value in noted.items() if key in known})
    if layout.lm != "pt":
        layout = dataclasses.replace(layout, lm_file=_DECODER)
    for file in (layout.lm_file, layout.tower, layout.omni):
        if file == ".." or (Path(file).name != file and file != "."):
            raise UserError(f"{source.path}: {INFO} names the file '{file}'; name one in a folder")
    return dataclasses.replace(layout, qkv=qkv or layout.qkv, lm=lm or layout.lm)


# Tensors.


def _decoder_names(source: Source, layout: _Layout) -> dict[str, tuple[str, ...]]:
    names = litgpt.table(source.config.text, layout.qkv)
    if layout.adapter:
        names |= {theirs: (ours,) for theirs, ours in ADAPTER.items()}
    return names


def _tower_names(source: Source, layout: _Layout) -> list[str]:
    left_out = ADAPTER.values() if layout.adapter and not layout.tower_proj else ()
    names = (name for name in mapping.expected(source.config) if name.startswith(TOWER_PREFIX))
    return [name for name in names if name not in left_out]


def _spec(source: Source, ours: tuple[str, ...]) -> shards.Spec:
    """Of our tensors as one."""
    specs = [source.specs[name] for name in ours]
    if len({spec.dtype for spec in specs}) > 1:
        raise UserError(
            f"{source.path}: '{ours[0]}' is {specs[0].dtype.name} and the other two of query, key "
            "and value are not, so they cannot be one tensor; convert with a dtype first"
        )
    rows = sum(spec.shape[0] for spec in specs)
    return shards.Spec((rows, *specs[0].shape[1:]), specs[0].dtype)


def _decoder_reader(
    source: Source,
    layout: _Layout,
    names: Mapping[str, tuple[str, ...]],
    advance: Callable[[int], None],
) -> shards.Read:
    text = source.config.text

    def read(wanted: list[str]) -> Iterator[tuple[str, np.ndarray]]:
        ours = [name for theirs in wanted for name in names[theirs]]
        tensors = iter(source.fetch(list(dict.fromkeys(ours))))
        seen: set[str] = set()
        for theirs in wanted:
            parts = []
            for name in names[theirs]:
                # Tied embeddings have two names.
                stream = iter(source.fetch([name])) if name in seen else tensors
                parts.append(next(stream)[1])
                seen.add(name)
            fused = litgpt.fuse(parts, layout.qkv, text) if len(parts) > 1 else parts[0]
            size = fused.nbytes
            while parts:
                # What is fused was copied; what is not is let go of by the writer.
                let_go(parts.pop())
            yield theirs, fused
            del fused  # before the next one is read
            advance(size)

    return read


def _tower_reader(source: Source, advance: Callable[[int], None]) -> shards.Read:
    def read(wanted: list[str]) -> Iterator[tuple[str, np.ndarray]]:
        for name, tensor in source.fetch([TOWER_PREFIX + name for name in wanted]):
            yield name.removeprefix(TOWER_PREFIX), tensor
            advance(tensor.nbytes)

    return read


# Files.


def _write_shards(
    folder: Path, specs: Mapping[str, shards.Spec], read: shards.Read, like: shards.Layout | None
) -> None:
    shards.write_folder(folder, specs, read, like=like)
    if not (folder / shards.INDEX).exists():
        # The authors' code asks for an index even of a single file.
        total = sum(spec.nbytes for spec in specs.values())
        weight_map = dict.fromkeys(sorted(specs), shards.SINGLE)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / shards.INDEX, index)


def _write_beside(folder: Path, source: Source, layout: _Layout) -> None:
    omni, inside = folder / layout.omni, f"{layout.omni}."
    omni.mkdir(exist_ok=True)
    config = _omni_config(source)
    for name, path in source.files.items():
        if name.startswith(inside):
            shutil.copyfile(path, omni / name.removeprefix(inside))
        elif name != hf.CONFIG or config is None:
            shutil.copyfile(path, folder / name.removeprefix(ASIDE))
    if source.tokenizer is not None and not (folder / hf.TOKENIZER).exists():
        shutil.copyfile(source.tokenizer, folder / hf.TOKENIZER)
    if not (omni / hf.CONFIG).exists():
        dtype = source.specs[source.params[0]].dtype
        config = config or hf.to_hf_config(source.config, dtype)
        # The authors' code asks for the full model's config, with the thinker's in it.
        is_full = "thinker_config" in config
        full = config if is_full else {"model_type": "qwen2_5_omni", "thinker_config": config}
        write_json(omni / hf.CONFIG, full)
    if not (folder / litgpt.CONFIG).exists():
        litgpt.write_config(folder / litgpt.CONFIG, source.config)
    write_info(folder / INFO, source.config, dict(source.provenance))


def _omni_config(source: Source) -> dict[str, Any] | None:
    """The ``config.json`` beside the weights, if it is that of a Qwen2.5-Omni."""
    if hf.CONFIG not in source.files:
        return None
    config = hf.read_config(source.files[hf.CONFIG])
    return config if str(config.get("model_type")).startswith("qwen2_5_omni") else None
