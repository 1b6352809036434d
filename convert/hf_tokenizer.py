"""Names for the control tokens of the stream in the tokenizer files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ai_jax.config import ModelConfig
from ai_jax.convert import hf
from ai_jax.convert.files import write_json

_FLAGS = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}


def name_controls(folder: Path, config: ModelConfig) -> None:
    """Name ``<silent>`` and ``<response>`` in the tokenizer of ``folder``, in place.

    Only ids that the tokenizer leaves free get a name: the format of the authors' release reuses
    tokens of the text, whose names stay. The embedding keeps its size, since it has rows for these
    ids already. Makes a ``tokenizer_config.json`` where there is none.
    """
    path = folder / hf.TOKENIZER
    if not path.is_file():
        return
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    names = _names(tokenizer)
    new = _new(config, names)
    if new:
        added = tokenizer.setdefault("added_tokens", [])
        added += [
            {"id": id, "content": name, **_FLAGS, "special": True} for id, name in new.items()
        ]
        added.sort(key=lambda token: token["id"])
        write_json(path, tokenizer)
    _write_config(folder / hf.TOKENIZER_CONFIG, config, names | new, new)
    legacy = folder / "added_tokens.json"
    if new and legacy.is_file():
        tokens = json.loads(legacy.read_text(encoding="utf-8"))
        write_json(legacy, tokens | {name: id for id, name in new.items()})


def _new(config: ModelConfig, names: dict[int, str]) -> dict[int, str]:
    """Names for the ids from the first that is free to the last control.

    A tokenizer numbers added tokens through, whatever ids its file gives them, so the ones before
    the controls need names as well.
    """
    stream = config.stream.format
    controls = {stream.silent: "<silent>", stream.response: "<response>"}
    taken = set(names.values())
    new = {}
    for id in range(max(names, default=-1) + 1, max(controls) + 1):
        free = id in controls and controls[id] not in taken
        new[id] = controls[id] if free else f"<unused{id}>"
    return new


def _names(tokenizer: dict[str, Any]) -> dict[int, str]:
    """Every id that has a name."""
    vocab = tokenizer.get("model", {}).get("vocab", {})
    added = {token["id"]: token["content"] for token in tokenizer.get("added_tokens", [])}
    return {id: name for name, id in vocab.items()} | added


def _write_config(
    path: Path, config: ModelConfig, names: dict[int, str], new: dict[int, str]
) -> None:
    if path.is_file():
        content = json.loads(path.read_text(encoding="utf-8"))
        decoder = content.get("added_tokens_decoder")
        if not new or decoder is None:
            return
        decoder |= {
            str(id): {"content": name, **_FLAGS, "special": True} for id, name in new.items()
        }
        write_json(path, content)
        return
    ids = {"eos_token": config.stream.format.eos, "pad_token": config.stream.format.pad}
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.text.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    write_json(path, content | {role: names[id] for role, id in ids.items() if id in names})
