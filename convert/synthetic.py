"""Model folders of any size with random weights, in the form of the published checkpoints.

They stand in for the real ones where what counts is names, shapes, bytes and time.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ai_jax.config import ModelConfig
from ai_jax.convert import hf, mapping, shards
from ai_jax.convert.files import Summary, progress, whole_folder, write_json

# The vision tower of Qwen2.5-Omni-3B. Its output has the decoder's width.
VISION = {
    "model_type": "qwen2_5_omni_vision_encoder",
    "depth": 32,
    "hidden_size": 1280,
    "num_heads": 16,
    "intermediate_size": 3420,
    "in_channels": 3,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_STD = 0.02
_BLOCK = 1 << 22


def write_random_folder(
    config: ModelConfig,
    out: str | Path,
    *,
    vision: Mapping[str, Any] | None = VISION,
    seed: int = 0,
    shard_bytes: int = shards.SHARD_BYTES,
    overwrite: bool = False,
) -> Summary:
    """Write a bfloat16 thinker with weights ~ N(0, 0.02), norms about one, and its config.

    vision: the vision tower's config; None leaves the tower out. The same seed gives the same
    files. Memory stays at one tensor. Raises UserError if ``out`` exists and ``overwrite`` is off.
    """
    start = time.monotonic()
    dtype = np.dtype(ml_dtypes.bfloat16)
    content = hf.to_hf_config(config, dtype)
    shapes = dict(mapping.expected(config))
    if vision is not None:
        content["vision_config"] = dict(vision) | {"out_hidden_size": config.text.hidden_size}
        shapes |= {f"visual.{k}": v for k, v in _vision(content["vision_config"]).items()}
    specs = {mapping.PREFIX + name: shards.Spec(shape, dtype) for name, shape in shapes.items()}
    size = sum(spec.nbytes for spec in specs.values())

    def draw(names: list[str]) -> Iterator[tuple[str, np.ndarray]]:
        for name in names:
            yield name, _draw(name, specs[name], seed)
            advance(specs[name].nbytes)

    with (
        whole_folder(out, overwrite=overwrite) as folder,
        progress(f"Writing {Path(out).name}", size) as advance,
    ):
        folder.mkdir()
        shards.write_folder(folder, specs, draw, shard_bytes=shard_bytes)
        write_json(folder / hf.CONFIG, content)
    return Summary(len(specs), size, time.monotonic() - start)


def _draw(name: str, spec: shards.Spec, seed: int) -> np.ndarray:
    out = np.empty(spec.shape, spec.dtype)
    flat = out.reshape(-1)
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    is_norm = any(part in name for part in ("norm", "ln_")) and name.endswith(".weight")
    for start in range(0, flat.size, _BLOCK):
        block = rng.standard_normal(min(_BLOCK, flat.size - start), np.float32)
        flat[start : start + _BLOCK] = (is_norm + _STD * block).astype(spec.dtype)
    return out


def _vision(c: Mapping[str, Any]) -> dict[str, mapping.Shape]:
    d, ffn, out = c["hidden_size"], c["intermediate_size"], c["out_hidden_size"]
    patch, merged = c["patch_size"], d * c["spatial_merge_size"] ** 2
    shapes = {
        "patch_embed.proj.weight": (d, c["in_channels"], c["temporal_patch_size"], patch, patch)
    }
    for i in range(c["depth"]):
        layer = {"norm1.weight": (d,), "norm2.weight": (d,)}
        for name in ("attn.q", "attn.k", "attn.v", "attn.proj"):
            layer |= mapping.linear(name, d, d)
        layer |= mapping.linear("mlp.gate_proj", ffn, d) | mapping.linear("mlp.up_proj", ffn, d)
        layer |= mapping.linear("mlp.down_proj", d, ffn)
        shapes |= {f"blocks.{i}.{k}": v for k, v in layer.items()}
    return (
        shapes
        | {"merger.ln_q.weight": (d,)}
        | mapping.linear("merger.mlp.0", merged, merged)
        | mapping.linear("merger.mlp.2", out, merged)
    )
