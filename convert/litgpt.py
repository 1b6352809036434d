"""litgpt's decoder, in which the authors publish: its names, fused tensors and config, and ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from ai_jax.config import ModelConfig, TextConfig
from ai_jax.errors import UserError

Order = Literal["concatenated", "grouped"]

CONFIG = "model_config.yaml"
# Query, key and value are rows of one tensor: all of one, then all of the next, or, in older files
# and under another name, the three of each group of heads together.
FUSED: dict[Order, str] = {"concatenated": "attn.qkv", "grouped": "attn.attn"}
_LAYER = {
    "norm_1": "input_layernorm",
    "attn.proj": "self_attn.o_proj",
    "norm_2": "post_attention_layernorm",
    "mlp.fc_1": "mlp.gate_proj",
    "mlp.fc_2": "mlp.up_proj",
    "mlp.proj": "mlp.down_proj",
}

# Names and layouts.


def table(text: TextConfig, order: Order) -> dict[str, tuple[str, ...]]:
    """litgpt's name -> ours: one, or those of the query, key and value that it fuses."""
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    names = {
        # litgpt always has both, so that with tied embeddings one tensor has two names.
        head: (embedding if text.tie_word_embeddings else head,),
        "transformer.wte.weight": (embedding,),
        "transformer.ln_f.weight": ("model.norm.weight",),
    }
    for i in range(text.num_hidden_layers):
        theirs, ours = f"transformer.h.{i}", f"model.layers.{i}"
        names |= {f"{theirs}.{k}.weight": (f"{ours}.{v}.weight",) for k, v in _LAYER.items()}
        for kind in ("weight", "bias"):
            parts = tuple(f"{ours}.self_attn.{part}_proj.{kind}" for part in "qkv")
            names[f"{theirs}.{FUSED[order]}.{kind}"] = parts
    return names


def part(fused: np.ndarray, index: int, order: Order, text: TextConfig) -> np.ndarray:
    """Query (0), key (1) or value (2) of a fused tensor; a view unless the rows are scattered."""
    groups, d = text.num_key_value_heads, text.head_dim
    heads = text.num_attention_heads // groups
    if order == "concatenated":
        ends = np.cumsum([0, groups * heads * d, groups * d, groups * d])
        return fused[ends[index] : ends[index + 1]]
    rows = fused.reshape(groups, heads + 2, d, *fused.shape[1:])
    first, last = ((0, heads), (heads, heads + 1), (heads + 1, heads + 2))[index]
    return rows[:, first:last].reshape(-1, *fused.shape[1:])


def fuse(parts: Sequence[np.ndarray], order: Order, text: TextConfig) -> np.ndarray:
    """The inverse of ``part``: query, key and value as one tensor."""
    if order == "concatenated":
        return np.concatenate(parts)
    rest = parts[0].shape[1:]
    shape = (text.num_key_value_heads, -1, text.head_dim, *rest)
    return np.concatenate([p.reshape(shape) for p in parts], axis=1).reshape(-1, *rest)


# The config.

_SIZES = {
    "n_layer": "num_hidden_layers",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_query_groups": "num_key_value_heads",
    "head_size": "head_dim",
    "intermediate_size": "intermediate_size",
    "padded_vocab_size": "vocab_size",
    "rope_base": "rope_theta",
    "norm_eps": "rms_norm_eps",
}
# What else litgpt could do: the only values that the model implements.
_FIXED = {
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "rotary_percentage": 1.0,
    "rope_condense_ratio": 1,
    "rope_adjustments": None,
    "attn_bias": True,
    "bias": False,
    "lm_head_bias": False,
    "norm_qk": False,
    "parallel_residual": False,
    "post_attention_norm": False,
    "post_mlp_norm": False,
    "scale_embeddings": False,
    "sliding_window_size": None,
    "attention_scores_scalar": None,
    "attention_logit_softcapping": None,
    "final_logit_softcapping": None,
}


def text_config(path: Path) -> TextConfig:
    """The decoder that a ``model_config.yaml`` describes. Raises UserError naming file and key."""
    data, sizes = _read(path)
    for key, field in _SIZES.items():
        if field not in sizes:
            raise UserError(f"{path}: the key '{key}' is missing")
    block_size = data.get("block_size")
    if isinstance(block_size, int):
        sizes["max_position_embeddings"] = block_size
    try:
        return TextConfig(**sizes)
    except UserError as e:
        raise UserError(f"{path}: {e}") from e


def check_config(path: Path, text: TextConfig, where: object) -> None:
    """Raise UserError, naming key and values, where ``path`` contradicts ``text`` of ``where``."""
    _, sizes = _read(path)
    for key, field in _SIZES.items():
        value = getattr(text, field)
        if sizes.get(field, value) != value:
            raise UserError(
                f"{path}: {key} is {sizes[field]}, but {field} is {value} in {where}; correct the "
                "one that does not belong to these weights"
            )


def write_config(path: Path, config: ModelConfig) -> None:
    """Write the ``model_config.yaml`` of a model's decoder."""
    text = config.text
    sizes = {key: getattr(text, field) for key, field in _SIZES.items()}
    # The authors' code makes a mask of block_size x block_size, so this is not what RoPE could do.
    data = {"name": "Qwen2.5", "block_size": config.stream.max_len, "vocab_size": text.vocab_size}
    path.write_text(yaml.safe_dump(data | sizes | _FIXED, sort_keys=False), encoding="utf-8")


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The file's mapping, and the sizes in it under our names."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as e:
        raise UserError(f"{path} is not readable YAML; download it again") from e
    if not isinstance(data, dict):
        raise UserError(f"{path} is not a mapping; download it again")
    for key, wanted in _FIXED.items():
        if data.get(key, wanted) != wanted:
            raise UserError(f"{path}: {key} is {data[key]!r}; only {wanted!r} can be run")
    sizes = {f: _number(path, key, data[key]) for key, f in _SIZES.items() if data.get(key)}
    # litgpt's own defaults.
    if "num_attention_heads" in sizes:
        sizes.setdefault("num_key_value_heads", sizes["num_attention_heads"])
        if "hidden_size" in sizes:
            width = sizes["hidden_size"] // sizes["num_attention_heads"]
            sizes.setdefault("head_dim", width)
    return data, sizes


def _number(path: Path, key: str, value: Any) -> int | float:
    kind = float if key in ("rope_base", "norm_eps") else int
    try:
        number = kind(value)  # YAML 1.1 reads 1e-6 as text
        if number == float(value) and number > 0:
            return number
    except (TypeError, ValueError):
        pass
    raise UserError(f"{path}: {key} is {value!r}; it must be a positive number")
