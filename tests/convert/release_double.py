"""The authors' layout, written from its description: folders in it, and a torch model that runs it.

torch is imported where it is needed, so that the folders can be had without it.
"""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import yaml
from safetensors.numpy import save_file

from ai_jax.config import ModelConfig
from ai_jax.convert import hf

BF16 = np.dtype(ml_dtypes.bfloat16)
TOWER = "audiointeraction_ChunkwisedEncoder"


class Release:
    """A folder of the authors: write it with ``save``, after changing what it is to hold.

    decoder, tower: name -> array. yaml: of ``model_config.yaml``; omni: of the Qwen2.5-Omni config,
    in the folder ``omni_in``. None leaves a file out.
    """

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        *,
        grouped=False,
        adapter=False,
        tower_proj=True,
        dtype=np.float32,
    ):
        self.folder = folder
        self.decoder = draw(decoder_shapes(config, grouped), dtype, seed=1)
        self.tower = draw(tower_shapes(config), dtype, seed=2)
        proj = {kind: self.tower[f"proj.{kind}"] for kind in ("weight", "bias")}
        if adapter:
            self.decoder |= {f"audio_adapter.{kind}": value for kind, value in proj.items()}
            # The tower's own is what training started from.
            self.tower |= {f"proj.{kind}": value + value for kind, value in proj.items()}
        if not tower_proj:
            del self.tower["proj.weight"], self.tower["proj.bias"]
        self.yaml = litgpt_config(config)
        thinker = hf.to_hf_config(config, np.dtype(dtype))
        self.omni = {"model_type": "qwen2_5_omni", "thinker_config": thinker}
        self.omni_in = "qwen25OmniConfig"
        self.beside = {"tokenizer_config.json": "{}", "LICENSE": "terms\r\n"}

    def save(self, lm="safetensors", tower="pth", shards=2, index=True, wrapped=False) -> Path:
        """lm: "safetensors", "pt" or "legacy" (before torch 1.6). tower: "pth", "safetensors"."""
        self.folder.mkdir()
        if lm == "safetensors":
            self._save_shards(shards, index)
        else:
            state = {"model": self.decoder, "step_count": 7} if wrapped else self.decoder
            torch_save(state, self.folder / "lit_model.pth", legacy=lm == "legacy")
        if tower == "safetensors":
            path = self.folder / f"{TOWER}.safetensors"
            save_file(self.tower, path, {"format": "pt"})
        else:
            torch_save(self.tower, self.folder / f"{TOWER}.pth", legacy=lm == "legacy")
        if self.yaml is not None:
            (self.folder / "model_config.yaml").write_text(yaml.safe_dump(self.yaml))
        if self.omni is not None:
            omni = self.folder / self.omni_in
            omni.mkdir(exist_ok=True)
            (omni / "config.json").write_text(json.dumps(self.omni))
            (omni / "preprocessor_config.json").write_text('{"feature_size": 80}')
        for name, content in self.beside.items():
            (self.folder / name).write_text(content, newline="")
        return self.folder

    def _save_shards(self, count: int, index: bool) -> None:
        names = list(self.decoder)
        weight_map = {}
        for i in range(count):
            file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            part = {name: self.decoder[name] for name in names[i::count]}
            save_file(part, self.folder / file, {"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        if index:
            content = {"metadata": {"total_size": 0}, "weight_map": weight_map}
            path = self.folder / "model.safetensors.index.json"
            path.write_text(json.dumps(content))


def decoder_shapes(config: ModelConfig, grouped: bool) -> dict[str, tuple[int, ...]]:
    t = config.text
    d, ffn = t.hidden_size, t.intermediate_size
    rows = (t.num_attention_heads + 2 * t.num_key_value_heads) * t.head_dim
    fused = "attn.attn" if grouped else "attn.qkv"
    shapes = {"lm_head.weight": (t.vocab_size, d), "transformer.wte.weight": (t.vocab_size, d)}
    for i in range(t.num_hidden_layers):
        layer = {
            "norm_1.weight": (d,),
            f"{fused}.weight": (rows, d),
            f"{fused}.bias": (rows,),
            "attn.proj.weight": (d, t.num_attention_heads * t.head_dim),
            "norm_2.weight": (d,),
            "mlp.fc_1.weight": (ffn, d),
            "mlp.fc_2.weight": (ffn, d),
            "mlp.proj.weight": (d, ffn),
        }
        shapes |= {f"transformer.h.{i}.{name}": shape for name, shape in layer.items()}
    return shapes | {"transformer.ln_f.weight": (d,)}


def tower_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    a = config.audio
    d, ffn, out = a.d_model, a.encoder_ffn_dim, a.output_dim
    weights = {"conv1": (d, a.num_mel_bins, 3), "conv2": (d, d, 3), "ln_post": (d,)}
    weights |= {"proj": (out, d), "audio_bos_eos_token": (2, out)}
    for i in range(a.encoder_layers):
        layer = {f"self_attn.{name}_proj": (d, d) for name in ("q", "k", "v", "out")}
        layer |= {"self_attn_layer_norm": (d,), "final_layer_norm": (d,)}
        layer |= {"fc1": (ffn, d), "fc2": (d, ffn)}
        weights |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes = {f"{name}.weight": shape for name, shape in weights.items()}
    for name, shape in weights.items():
        if not name.endswith(("k_proj", "token")):
            shapes[f"{name}.bias"] = shape[:1]
    return shapes


def draw(shapes, dtype, seed):
    """Random weights of which each matters: scales about one, biases too."""
    rng = np.random.default_rng(seed)

    def tensor(name, shape):
        x = rng.standard_normal(shape)
        if len(shape) == 1:
            return name.endswith("weight") + 0.2 * x
        return x * np.prod(shape[1:]) ** -0.5

    return {name: tensor(name, shape).astype(dtype) for name, shape in shapes.items()}


def litgpt_config(config: ModelConfig) -> dict:
    t = config.text
    return {
        "name": "Qwen2.5-3B",
        "hf_config": {"org": "Qwen", "name": "Qwen2.5-3B"},
        "block_size": 4096,
        "vocab_size": t.vocab_size - 20,
        "padding_multiple": 512,
        "padded_vocab_size": t.vocab_size,
        "n_layer": t.num_hidden_layers,
        "n_embd": t.hidden_size,
        "n_head": t.num_attention_heads,
        "head_size": t.head_dim,
        "n_query_groups": t.num_key_value_heads,
        "intermediate_size": t.intermediate_size,
        "norm_class_name": "RMSNorm",
        "mlp_class_name": "LLaMAMLP",
        "norm_eps": t.rms_norm_eps,
        "rope_base": int(t.rope_theta),
        "rotary_percentage": 1.0,
        "attn_bias": True,
        "bias": False,
        "lm_head_bias": False,
        "parallel_residual": False,
        "rope_adjustments": None,
    }


# Files and models of torch.


def as_torch(array: np.ndarray):
    import torch

    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def torch_save(state, path: Path, legacy=False) -> None:
    import torch

    def convert(value):
        if isinstance(value, dict):
            return {key: convert(item) for key, item in value.items()}
        return as_torch(value) if isinstance(value, np.ndarray) else value

    torch.save(convert(state), path, _use_new_zipfile_serialization=not legacy)


def run(release: Release, config: ModelConfig, tokens, mel_cfm, *, fp16_positions=False):
    """float32 logits [t, v] of one stream of the torch model, whose chunks are ``mel_cfm``."""
    import torch

    decoder = {name: as_torch(x).float() for name, x in release.decoder.items()}
    tower = {name: as_torch(x).float() for name, x in release.tower.items()}
    with torch.no_grad():
        vectors = _encode(tower, config, torch.from_numpy(mel_cfm))
        proj = decoder if "audio_adapter.weight" in decoder else tower
        prefix = "audio_adapter" if proj is decoder else "proj"
        audio = _linear(proj, prefix, vectors).reshape(-1, config.text.hidden_size)
        ids = torch.tensor(tokens)
        x = decoder["transformer.wte.weight"][ids]
        x[ids == config.stream.format.audio] = audio
        rope = _rope(config.text, len(tokens), fp16_positions)
        for i in range(config.text.num_hidden_layers):
            x = _block(decoder, f"transformer.h.{i}.", config.text, x, rope)
        x = _rms_norm(decoder["transformer.ln_f.weight"], x, config.text.rms_norm_eps)
        return (x @ decoder["lm_head.weight"].T).numpy()


def _linear(state, name, x):
    y = x @ state[f"{name}.weight"].T
    bias = state.get(f"{name}.bias")
    return y if bias is None else y + bias


def _rms_norm(weight, x, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def _rope(text, length, fp16_positions):
    import torch

    frequencies = 1.0 / (text.rope_theta ** (torch.arange(0, text.head_dim, 2) / text.head_dim))
    dtype = torch.float16 if fp16_positions else torch.float32
    angles = torch.outer(torch.arange(length, dtype=dtype).float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def _rotated(x_htd, rope):
    import torch

    a, b = x_htd.chunk(2, dim=-1)
    return x_htd * rope[0] + torch.cat([-b, a], dim=-1) * rope[1]


def _block(state, at, text, x, rope):
    import torch

    h = _rms_norm(state[f"{at}norm_1.weight"], x, text.rms_norm_eps)
    groups, d = text.num_key_value_heads, text.head_dim
    heads = text.num_attention_heads // groups
    if f"{at}attn.attn.weight" in state:
        rows = _linear(state, f"{at}attn.attn", h).view(len(x), groups, heads + 2, d)
        q, k, v = rows[:, :, :heads].flatten(1, 2), rows[:, :, heads], rows[:, :, heads + 1]
    else:
        rows = _linear(state, f"{at}attn.qkv", h).split(
            [groups * heads * d, groups * d, groups * d], 1
        )
        q, k, v = (part.view(len(x), -1, d) for part in rows)
    q, k = (_rotated(part.transpose(0, 1), rope) for part in (q, k))
    k, v = (part.repeat_interleave(heads, 0) for part in (k, v.transpose(0, 1)))
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(1, 2) * d**-0.5).masked_fill(future, -torch.inf)
    out = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    x = x + _linear(state, f"{at}attn.proj", out)
    h = _rms_norm(state[f"{at}norm_2.weight"], x, text.rms_norm_eps)
    gate = torch.nn.functional.silu(_linear(state, f"{at}mlp.fc_1", h))
    return x + _linear(state, f"{at}mlp.proj", gate * _linear(state, f"{at}mlp.fc_2", h))


def _encode(state, config, mel_cfm):
    """The tower up to ``ln_post``, each chunk alone."""
    import torch
    from torch.nn.functional import conv1d, gelu, layer_norm

    audio = config.audio
    c, width = len(mel_cfm), audio.d_model

    def norm(name, x):
        return layer_norm(x, [width], state[f"{name}.weight"], state[f"{name}.bias"])

    x = gelu(conv1d(mel_cfm.transpose(1, 2), state["conv1.weight"], state["conv1.bias"], 1, 1))
    x = gelu(conv1d(x, state["conv2.weight"], state["conv2.bias"], 2, 1)).transpose(1, 2)
    steps = torch.exp(torch.arange(width // 2) * (-np.log(10000) / (width // 2 - 1)))
    angles = torch.outer(torch.arange(x.shape[1]), steps)
    x = x + torch.cat([angles.sin(), angles.cos()], dim=1)
    for i in range(audio.encoder_layers):
        at = f"layers.{i}."
        h = norm(f"{at}self_attn_layer_norm", x)
        q, k, v = (
            _linear(state, f"{at}self_attn.{name}_proj", h)
            .view(c, x.shape[1], audio.encoder_attention_heads, -1)
            .transpose(1, 2)
            for name in "qkv"
        )
        scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
        out = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + _linear(state, f"{at}self_attn.out_proj", out)
        h = gelu(_linear(state, f"{at}fc1", norm(f"{at}final_layer_norm", x)))
        x = x + _linear(state, f"{at}fc2", h)
    return norm("ln_post", x.view(c, -1, 2, width).mean(2))
