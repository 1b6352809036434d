"""Tiny model folders as they come from elsewhere: the thinker alone, or the full Qwen2.5-Omni."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from ai_jax.convert import hf, mapping

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
VISION = {"visual.patch_embed.proj.weight": (4, 3, 2, 2, 2)}
OTHERS = {"talker.model.norm.weight": (8,), "token2wav.decoder.conv.weight": (2, 3, 1)}


class Source:
    """A folder in Hugging Face format: write it with ``save``, after changing ``tensors``."""

    def __init__(self, folder: Path, config, dtype="bfloat16", full=False):
        self.folder = folder
        rng = np.random.default_rng(0)

        def draw(shape, kind=DTYPES[dtype]):
            return rng.standard_normal(shape).astype(kind)

        self.prefix = "thinker." if full else ""
        shapes = mapping.expected(config) | VISION
        self.tensors = {self.prefix + name: draw(shape) for name, shape in shapes.items()}
        self.config = hf.to_hf_config(config, np.dtype(DTYPES[dtype]))
        if full:
            # The vocoder stays in float32 in a bfloat16 model.
            self.tensors |= {name: draw(shape, np.float32) for name, shape in OTHERS.items()}
            self.config = {"model_type": "qwen2_5_omni", "thinker_config": self.config}
        self.info = None

    def save(self, *, shards: list[list[str]] | None = None, index: bool = True) -> Path:
        self.folder.mkdir(exist_ok=True)
        text = {
            "config.json": json.dumps(self.config),
            "tokenizer_config.json": "{}",
            "chat_template.jinja": "{{ x }}\r\n",
            "LICENSE": "terms",
            "README.md": "card",
        }
        if self.info is not None:
            text["ai_jax.json"] = json.dumps(self.info)
        for name, content in text.items():
            (self.folder / name).write_text(content, newline="")
        if shards is None:
            save_file(self.tensors, self.folder / "model.safetensors", {"format": "pt"})
            return self.folder
        weight_map = {}
        for i, names in enumerate(shards, 1):
            file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
            part = {name: self.tensors[name] for name in names}
            save_file(part, self.folder / file, {"format": "pt"})
            weight_map |= dict.fromkeys(names, file)
        if index:
            size = sum(t.nbytes for t in self.tensors.values())
            content = {"metadata": {"total_size": size}, "weight_map": weight_map}
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(content))
        return self.folder
