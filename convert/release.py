"""The authors' published model: which folders hold one, and opening it without reading weights.

A folder holds the decoder under litgpt's names (safetensors shards, or a ``.pt``, with or without
``{"model": ...}`` around it), ``model_config.yaml``, the audio tower under bare names (a ``.pth``),
the tokenizer, and a folder with the config of Qwen2.5-Omni.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from ai_jax.config import ModelConfig
from ai_jax.convert import hf, litgpt, mapping, pickles, shards
from ai_jax.convert.files import INFO, read_info
from ai_jax.convert.mapped import let_go
from ai_jax.convert.release_config import find_config
from ai_jax.convert.release_files import Weights, find_omni, find_weights, side_files
from ai_jax.convert.source import Source
from ai_jax.errors import UserError

# The tower's last layer, where training keeps it: in the decoder's file, under a name of its own.
ADAPTER = {f"audio_adapter.{kind}": f"audio_tower.proj.{kind}" for kind in ("weight", "bias")}

TOWER_PREFIX = "audio_tower."
_DTYPES = ("float32", "float16", "bfloat16")


def is_release(path: Path) -> bool:
    """Whether the folder ``path`` is one of the authors' (whole or not)."""
    try:
        names = [name for file in path.glob("*.safetensors") for name in shards.open_file(file)]
    except UserError:
        names = []
    if any(name.startswith("transformer.") for name in names):
        return True
    if any(name.endswith("model.embed_tokens.weight") for name in names):
        return False  # Hugging Face's, whatever lies beside
    files = [p for p in path.iterdir() if p.name != hf.SPEAKERS]
    return any(p.name == litgpt.CONFIG or p.suffix in pickles.SUFFIXES for p in files)


def open_release(path: str | Path, *, fp16_positions: bool = False) -> Source:
    """Open a folder of the authors; its names and layouts become ours.

    The tower's ``proj`` is the decoder's ``audio_adapter`` where there is one: training keeps it
    there, and a ``proj`` of the tower's own is older. A head next to tied embeddings counts if it
    differs from them, as it does in the authors' code. The stream format is ``release``, unless an
    ``ai_jax.json`` lies there, which is then the config. ``provenance["release"]`` says what the
    folder's layout was: ``qkv``, ``lm`` (form), ``lm_file``, ``wrapped``, ``adapter`` (present),
    ``tower`` (file), ``tower_proj`` (present), ``omni`` (the config's folder, if there is one).

    fp16_positions: see ``TextConfig``; off, it is what ``ai_jax.json`` says. Raises UserError
    naming the tensor or file that is missing, damaged, unknown, there twice or of the wrong shape,
    would have to be run (pickles are never), or contradicts another.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the folder with the authors' files")
    decoder, tower = find_weights(folder)
    omni = find_omni(folder)
    config = find_config(folder, omni, decoder, tower)
    if fp16_positions:
        config = dataclasses.replace(
            config, text=dataclasses.replace(config.text, fp16_positions=True)
        )
    order = _order(decoder)
    adapter = any(name in decoder.tensors for name in ADAPTER)
    origin = _match(config, order, adapter, decoder, tower)
    expected = mapping.expected(config)

    def fetch(names: list[str]) -> Iterator[tuple[str, np.ndarray]]:
        for name in names:
            whole, index = origin[name]
            tensor = whole if index is None else litgpt.part(whole, index, order, config.text)
            tensor = np.ascontiguousarray(tensor)
            if not np.may_share_memory(tensor, whole):
                let_go(whole)
            yield name, tensor

    files = side_files(folder, omni)
    info = folder / INFO
    layout = {
        "qkv": order,
        "lm": decoder.form,
        "lm_file": decoder.files[0].name,
        "wrapped": decoder.wrapped,
        "adapter": adapter,
        "tower": tower.files[0].name,
        "tower_proj": "proj.weight" in tower.tensors,
    }
    if omni is not None:
        layout["omni"] = str(omni.relative_to(folder))
    return Source(
        path=folder,
        kind="release",
        config=config,
        specs={n: shards.Spec(shape, origin[n][0].dtype) for n, shape in expected.items()},
        params=tuple(expected),
        fetch=fetch,
        tokenizer=files.get(hf.TOKENIZER),
        files=files,
        # No info: an ai_jax.json that lies there does not say how the folder is laid out.
        layout=shards.Layout.of(folder) if decoder.form == "safetensors" else None,
        provenance=(read_info(info)[1] if info.exists() else {})
        | {"source": "release", "release": layout},
    )


def _order(decoder: Weights) -> litgpt.Order:
    """Which of the two fused orders the decoder has; its tensors' names tell."""
    first = {
        order: next((name for name in decoder.tensors if f".{part}." in name), None)
        for order, part in litgpt.FUSED.items()
    }
    if all(first.values()):
        raise UserError(
            f"{decoder.where}: '{first['concatenated']}' and '{first['grouped']}' hold queries, "
            "keys and values in two orders; keep the tensors of one"
        )
    return "grouped" if first["grouped"] else "concatenated"


def _match(
    config: ModelConfig,
    order: litgpt.Order,
    adapter: bool,
    decoder: Weights,
    tower: Weights,
) -> dict[str, tuple[np.ndarray, int | None]]:
    """Our name -> the tensor that holds it and, if that is fused, which part. Or UserError."""
    expected = mapping.expected(config)
    names = litgpt.table(config.text, order)
    if config.text.tie_word_embeddings and "lm_head.weight" not in decoder.tensors:
        del names["lm_head.weight"]
    if adapter:
        names |= {theirs: (ours,) for theirs, ours in ADAPTER.items()}
    bare = {n: n.removeprefix(TOWER_PREFIX) for n in expected if n.startswith(TOWER_PREFIX)}
    if adapter and not any(ADAPTER[n].removeprefix(TOWER_PREFIX) in tower.tensors for n in ADAPTER):
        bare = {n: b for n, b in bare.items() if n not in ADAPTER.values()}
    if not adapter and "proj.weight" not in tower.tensors:
        raise UserError(
            f"{tower.where}: the tensor 'proj.weight' is missing, and there is no "
            f"'audio_adapter.weight' in {decoder.where} instead; take both files from one release"
        )
    _check(decoder, {n: [expected[o] for o in ours] for n, ours in names.items()})
    _check(tower, {b: [expected[n]] for n, b in bare.items()})
    origin: dict[str, tuple[np.ndarray, int | None]] = {}
    origin |= {n: (tower.tensors[b], None) for n, b in bare.items()}
    for theirs, ours in names.items():
        for i, name in enumerate(ours):
            origin[name] = decoder.tensors[theirs], i if len(ours) > 1 else None
    return origin


def _check(weights: Weights, want: Mapping[str, list[mapping.Shape]]) -> None:
    """Every wanted tensor is there in its shape (rows of several parts are added), and no other."""
    where = weights.where
    for name, tensor in weights.tensors.items():
        if name not in want:
            close = difflib.get_close_matches(name, want, n=1)
            hint = f" (the nearest one that the model has is '{close[0]}')" if close else ""
            raise UserError(
                f"{where}: the tensor '{name}' has no place in this model{hint}; remove it, or "
                "correct the layer counts in the folder's config"
            )
        shape = (sum(s[0] for s in want[name]), *want[name][0][1:])
        if tensor.shape != shape:
            rows = " + ".join(str(s[0]) for s in want[name])
            parts = f" ({rows} rows of query, key and value)" if len(want[name]) > 1 else ""
            raise UserError(
                f"{where}: the tensor '{name}' has shape {list(tensor.shape)}, but the config asks "
                f"for {list(shape)}{parts}; correct the sizes in the folder's config"
            )
        if tensor.dtype.name not in _DTYPES:
            raise UserError(
                f"{where}: the tensor '{name}' is {tensor.dtype.name}; give the unquantised model, "
                f"in {', '.join(_DTYPES[:2])} or {_DTYPES[2]}"
            )
    for name in want:
        if name not in weights.tensors:
            raise UserError(
                f"{where}: the tensor '{name}' is missing; download the file again, or correct the "
                "layer counts in the folder's config"
            )
