"""Model folders in Hugging Face format: opening one, and their config to ours and back.

A folder holds ``config.json`` (``Qwen2_5OmniThinkerConfig``, or the full Qwen2.5-Omni config
around it), safetensors weights, ``tokenizer.json`` and, once we wrote it, ``ai_jax.json``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ai_jax.audio.mel import MelConfig
from ai_jax.config import AudioConfig, ModelConfig, StreamConfig, TextConfig, from_dict
from ai_jax.convert import mapping, shards
from ai_jax.convert.files import INFO, check_links, read_info
from ai_jax.convert.source import Source
from ai_jax.errors import UserError
from ai_jax.tokens import PAPER, StreamFormat

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CARD = "README.md"
PREPROCESSOR = "preprocessor_config.json"
SPEAKERS = "spk_dict.pt"  # the talker's voices
THINKER = "qwen2_5_omni_thinker"
ARCHITECTURE = "Qwen2_5OmniThinkerForConditionalGeneration"

# The stock model reads 2 s blocks; here the same weights listen in chunks of 400 ms.
_OFFLINE_N_WINDOW, _STREAMING_N_WINDOW = 100, 20
# transformers 5 writes the first, transformers 4 the second.
_DTYPE_KEYS = ("dtype", "torch_dtype")
_WEIGHTS_OR_CODE = (".safetensors", ".bin", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".py")

# transformers leaves out of config.json what equals these defaults of its config classes.
_AUDIO_DEFAULTS = {
    "num_mel_bins": 128,
    "d_model": 1280,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "max_source_positions": 1500,
    "n_window": _OFFLINE_N_WINDOW,
    "output_dim": 3584,
}
_TEXT_DEFAULTS = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
}
# The only variants that the model implements: (section, key, allowed values).
_FIXED = (
    ("audio_config", "activation_function", ("gelu",)),
    ("audio_config", "scale_embedding", (False,)),
    ("text_config", "hidden_act", ("silu",)),
    ("text_config", "use_sliding_window", (False,)),
)

# transformers always builds a vision tower. This is the smallest one that it accepts: no layers,
# and one attention head of four channels, the least that can be rotated along two axes.
NO_VISION = {
    "model_type": "qwen2_5_omni_vision_encoder",
    "depth": 0,
    "fullatt_block_indexes": [],
    "hidden_size": 4,
    "num_heads": 1,
    "intermediate_size": 1,
    "in_channels": 1,
    "patch_size": 1,
    "temporal_patch_size": 1,
    "spatial_merge_size": 1,
    "out_hidden_size": 4,
}
NO_VISION_SHAPES: dict[str, mapping.Shape] = {
    "visual.patch_embed.proj.weight": (4, 1, 1, 1, 1),
    "visual.merger.ln_q.weight": (4,),
    "visual.merger.mlp.0.weight": (4, 4),
    "visual.merger.mlp.0.bias": (4,),
    "visual.merger.mlp.2.weight": (4, 4),
    "visual.merger.mlp.2.bias": (4,),
}


def open_hf(folder: Path) -> Source:
    """Open a model folder in Hugging Face format.

    Raises UserError naming the tensor or file that is missing, damaged, unknown, duplicated, of the
    wrong shape or not of floating point, or a config that the model cannot follow.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give a folder in Hugging Face format")
    check_links(folder)
    config = model_config(folder)
    tensors = shards.open_folder(folder)
    _check_dtypes(config, tensors, folder)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    found = mapping.partition(config, shapes, folder)
    canonical = {mapping.to_ours(name, found.prefix): name for name in tensors}
    if config.text.tie_word_embeddings and mapping.HEAD in canonical:
        pair = (mapping.EMBEDDING, mapping.HEAD)
        _check_tied(*(tensors[canonical[name]] for name in pair), folder)

    def fetch(names: list[str]) -> Iterator[tuple[str, np.ndarray]]:
        return ((name, tensors[canonical[name]]) for name in names)

    info = folder / INFO if (folder / INFO).exists() else None
    return Source(
        path=folder,
        kind="hf",
        config=config,
        specs={
            name: shards.Spec(tensors[hf_name].shape, tensors[hf_name].dtype)
            for name, hf_name in canonical.items()
        },
        params=tuple(found.params),
        fetch=fetch,
        prefix=found.prefix,
        tokenizer=folder / TOKENIZER if (folder / TOKENIZER).is_file() else None,
        files={path.name: path for path in side_files(folder)},
        layout=shards.Layout.of(folder),
        info=info,
        provenance=read_info(info)[1] if info else {"source": folder.resolve().name},
    )


def _check_dtypes(config: ModelConfig, tensors: dict[str, np.ndarray], folder: Path) -> None:
    """Before names and shapes, in which quantised models differ too, but not for a user's fault."""
    runs = mapping.expected(config)
    for name, tensor in tensors.items():
        dtype = tensor.dtype.name
        floating = dtype in ("float32", "float16", "bfloat16")
        if not floating and mapping.to_ours(name, mapping.PREFIX) in runs:
            raise UserError(
                f"{folder}: the tensor '{name}' is {dtype}; give the unquantised model, in "
                "float32, float16 or bfloat16"
            )


def _check_tied(embedding: np.ndarray, head: np.ndarray, folder: Path) -> None:
    """A head that nobody reads must at least not differ from the embedding read in its place."""
    same = embedding.shape == head.shape and embedding.dtype == head.dtype
    bits = f"u{embedding.itemsize}"
    if not same or not np.array_equal(embedding.view(bits), head.view(bits)):
        raise UserError(
            f"{folder}: config.json ties the head to the embedding, but 'lm_head.weight' differs "
            "from it; set tie_word_embeddings to false there, or remove the tensor"
        )


def model_config(folder: Path) -> ModelConfig:
    """The model of a folder: its ``ai_jax.json``, else what ``config.json`` says. Or UserError."""
    path = folder / CONFIG
    if not path.exists():
        raise UserError(f"{folder} has no {CONFIG}; give a folder in Hugging Face format")
    data = read_config(path)
    if (folder / INFO).exists():
        return read_info(folder / INFO)[0]
    return from_hf_config(data, name=folder.resolve().name, where=path)


def read_config(path: Path) -> dict[str, Any]:
    """The content of a ``config.json``; UserError if it is damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        data = None
    if not isinstance(data, dict):
        raise UserError(f"{path} is not a readable JSON mapping; download it again")
    return data


def from_hf_config(data: Any, *, name: str, where: object) -> ModelConfig:
    """Our config for a Hugging Face ``config.json``: same sizes, 400 ms chunks, paper format.

    Raises UserError if it is not a Qwen2.5-Omni or asks for something that the model does not do.
    """
    whole = data if isinstance(data, dict) else {}
    thinker = _section(whole, "thinker_config", where) or whole
    if thinker.get("model_type") != THINKER:
        raise UserError(
            f"{where}: model_type is {whole.get('model_type')!r}, and there is no thinker_config "
            f"of the model_type {THINKER!r}; give a Qwen2.5-Omni model"
        )
    for section, key, allowed in _FIXED:
        value = _section(thinker, section, where).get(key, allowed[0])
        if value not in allowed:
            raise UserError(
                f"{where}: {section}.{key} is {value!r}, but only {allowed[0]!r} can be run; "
                "take another model"
            )
    audio = _sizes(thinker, "audio_config", _AUDIO_DEFAULTS, where)
    if audio["n_window"] == _OFFLINE_N_WINDOW:
        audio["n_window"] = _STREAMING_N_WINDOW
    audio = from_dict(AudioConfig, audio, where=str(where), key="audio_config")
    text = from_dict(TextConfig, _text_section(thinker, where), where=str(where), key="text_config")
    return ModelConfig(
        name=name,
        audio=audio,
        text=text,
        mel=MelConfig(n_mels=audio.num_mel_bins, chunk_frames=audio.chunk_frames),
        stream=StreamConfig(
            format=_stream_format(thinker, text.vocab_size, where),
            max_len=min(4096, text.max_position_embeddings),
        ),
    )


def _section(data: dict[str, Any], key: str, where: object) -> dict[str, Any]:
    """A part of a config; one that is null or not there is empty. UserError if it is no mapping."""
    section = data.get(key)
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise UserError(f"{where}: {key} is not a mapping; download the file again")
    return section


def _sizes(
    data: dict[str, Any], key: str, defaults: dict[str, Any], where: object
) -> dict[str, Any]:
    """The sizes that a section gives. UserError if one is not a number above zero."""
    section = _section(data, key, where)
    sizes = {name: section.get(name, default) for name, default in defaults.items()}
    for name, size in sizes.items():
        whole = isinstance(defaults[name], int)
        if type(size) not in ((int,) if whole else (int, float)) or not size > 0:
            raise UserError(
                f"{where}: {key}.{name} is {size!r}, not a {'whole ' * whole}number above zero; "
                "download the file again"
            )
    return sizes


def _text_section(thinker: dict[str, Any], where: object) -> dict[str, Any]:
    raw = _section(thinker, "text_config", where)
    if "num_key_value_heads" in raw and raw["num_key_value_heads"] is None:
        raw = raw | {"num_key_value_heads": raw.get("num_attention_heads")}
    text = _sizes({"text_config": raw}, "text_config", _TEXT_DEFAULTS, where)
    head_dim = raw.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    # transformers 5 keeps theta with the rope parameters, transformers 4 beside them.
    rope = _section(raw, "rope_parameters", where) or _section(raw, "rope_scaling", where)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "mrope"):
        raise UserError(f"{where}: text_config.rope_type is '{kind}'; only 'default' can be run")
    return text | {
        "head_dim": head_dim,
        "rope_theta": rope.get("rope_theta", raw.get("rope_theta", 1e6)),
        # The thinker's value counts; the text section's own default is the opposite.
        "tie_word_embeddings": thinker.get("tie_word_embeddings", False),
    }


def _stream_format(thinker: dict[str, Any], vocab: int, where: object) -> StreamFormat:
    """The paper's format. A vocabulary too small for its ids has the controls in its last rows."""
    if vocab > PAPER.response:
        return PAPER
    if vocab > PAPER.eos:
        raise UserError(
            f"{where}: vocab_size is {vocab}, which leaves no rows for the control tokens "
            f"{PAPER.silent} and {PAPER.response}; resize the embeddings to 151936 rows "
            "(resize_token_embeddings), or take the original checkpoint"
        )
    ids = thinker | thinker.get("text_config", {})

    def known(key: str, fallback: int) -> int:
        token = ids.get(key)
        return token if isinstance(token, int) and token < vocab else fallback

    return StreamFormat(
        silent=vocab - 2,
        response=vocab - 1,
        eos=known("eos_token_id", vocab - 3),
        audio=known("audio_token_index", vocab - 4),
        pad=known("pad_token_id", vocab - 5),
    )


def to_hf_config(config: ModelConfig, dtype: np.dtype) -> dict[str, Any]:
    """A ``config.json`` with which ``Qwen2_5OmniThinkerForConditionalGeneration`` loads a model."""
    text, half = config.text, config.text.head_dim // 2
    # All three axes hold the same position when there is no vision, so any split will do.
    side = 3 * half // 8
    tie = text.tie_word_embeddings
    stream = config.stream.format
    return {
        "architectures": [ARCHITECTURE],
        "model_type": THINKER,
        "dtype": dtype.name,
        "tie_word_embeddings": tie,
        "audio_token_index": stream.audio,
        "audio_config": {"model_type": "qwen2_5_omni_audio_encoder"}
        | {k: getattr(config.audio, k) for k in _AUDIO_DEFAULTS},
        "text_config": {"model_type": "qwen2_5_omni_text"}
        | {k: getattr(text, k) for k in _TEXT_DEFAULTS}
        | {
            "head_dim": text.head_dim,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": text.rope_theta,
                "mrope_section": [half - 2 * side, side, side],
            },
            "tie_word_embeddings": tie,
            "pad_token_id": stream.pad,
            "eos_token_id": stream.eos,
        },
        "vision_config": NO_VISION,
    }


def side_files(folder: Path) -> list[Path]:
    """What a folder holds beside weights: config, tokenizer, licence, card, templates ..."""
    return sorted(
        p
        for p in folder.iterdir()
        if p.is_file()
        and p.suffix not in _WEIGHTS_OR_CODE
        and not p.name.startswith(".")
        and p.name not in (INFO, shards.INDEX)
    )


def tokenizer_files(tokenizer: Path) -> dict[str, Path]:
    """A ``tokenizer.json`` and the ``tokenizer_config.json`` beside it, if there is one."""
    beside = tokenizer.with_name(TOKENIZER_CONFIG)
    files = {TOKENIZER: tokenizer}
    return files | {TOKENIZER_CONFIG: beside} if beside.is_file() else files


def set_dtype(config: dict[str, Any], dtype: np.dtype) -> None:
    """Have a config.json say which dtype the tensors have that the model runs.

    The sections of vision tower, talker and vocoder keep theirs, as their tensors do.
    """
    thinker = config.get("thinker_config", config)
    sections = [thinker.get(f"{part}_config", {}) for part in ("audio", "text")]
    for section in (config, thinker, *sections):
        for key in _DTYPE_KEYS:
            if section.get(key) is not None:
                section[key] = dtype.name
    if not any(config.get(key) for key in _DTYPE_KEYS):
        config["dtype"] = dtype.name


def thinker_alone(config: dict[str, Any]) -> dict[str, Any]:
    """The thinker's part of a full ``config.json`` as one of its own."""
    shared = {key: config[key] for key in (*_DTYPE_KEYS, "transformers_version") if key in config}
    return config["thinker_config"] | shared | {"architectures": [ARCHITECTURE]}


def preprocessor(config: ModelConfig) -> dict[str, Any]:
    """A ``preprocessor_config.json`` for ``WhisperFeatureExtractor``, the offline log-mel."""
    mel = config.mel
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": mel.n_mels,
        "sampling_rate": mel.sample_rate,
        "n_fft": mel.n_fft,
        "hop_length": mel.hop_length,
        "chunk_length": 300,
        "padding_value": 0.0,
        "padding_side": "right",
        "return_attention_mask": True,
    }
