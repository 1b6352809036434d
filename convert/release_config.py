"""The config of a folder of the authors."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from ai_jax.audio.mel import MelConfig
from ai_jax.config import AudioConfig, ModelConfig, StreamConfig
from ai_jax.convert import hf, litgpt
from ai_jax.convert.files import INFO, read_info
from ai_jax.convert.release_files import OMNI, Weights
from ai_jax.errors import UserError
from ai_jax.tokens import RELEASE, StreamFormat

_WHISPER_HEAD_DIM = 64


def find_config(folder: Path, omni: Path | None, decoder: Weights, tower: Weights) -> ModelConfig:
    theirs = folder / litgpt.CONFIG
    name = folder.resolve().name
    if (folder / INFO).exists():
        where, config = folder / INFO, read_info(folder / INFO)[0]
    elif omni is not None:
        where, config = omni / hf.CONFIG, hf.model_config(omni)
        stream = dataclasses.replace(
            config.stream, format=stream_format(config.text.vocab_size, where)
        )
        config = dataclasses.replace(config, name=name, stream=stream)
    elif theirs.is_file():
        return _derived(name, theirs, tower)
    else:
        raise UserError(
            f"{folder} says nowhere what model it is; put {litgpt.CONFIG} there, or the folder "
            f"{OMNI} with the config of Qwen2.5-Omni"
        )
    if theirs.is_file():
        litgpt.check_config(theirs, config.text, where)
    head = decoder.tensors.get("lm_head.weight")
    embedding = decoder.tensors.get("transformer.wte.weight")
    if config.text.tie_word_embeddings and head is not None and embedding is not None:
        bits = [array.view(f"u{array.itemsize}") for array in (head, embedding)]
        if not np.array_equal(*bits):
            text = dataclasses.replace(config.text, tie_word_embeddings=False)
            config = dataclasses.replace(config, text=text)
    return config


def _derived(name: str, path: Path, tower: Weights) -> ModelConfig:
    """The config where only ``model_config.yaml`` and the tower's shapes tell it."""
    text = litgpt.text_config(path)
    shapes = {name: tensor.shape for name, tensor in tower.tensors.items()}
    try:
        width, mels, _ = shapes["conv1.weight"]
        if width % _WHISPER_HEAD_DIM:
            raise UserError(
                f"{tower.where}: its width {width} does not tell the number of attention heads; "
                f"put the folder {OMNI} with the config of Qwen2.5-Omni beside it"
            )
        audio = AudioConfig(
            num_mel_bins=mels,
            d_model=width,
            encoder_layers=len({k.split(".")[1] for k in shapes if k.startswith("layers.")}),
            encoder_attention_heads=width // _WHISPER_HEAD_DIM,
            encoder_ffn_dim=shapes["layers.0.fc1.weight"][0],
            output_dim=text.hidden_size,
        )
    except KeyError as e:
        raise UserError(f"{tower.where}: the tensor {e} is missing; download the file again") from e
    return ModelConfig(
        name=name,
        audio=audio,
        text=text,
        mel=MelConfig(n_mels=mels, chunk_frames=audio.chunk_frames),
        stream=StreamConfig(
            format=stream_format(text.vocab_size, path),
            max_len=min(4096, text.max_position_embeddings),
        ),
    )


def stream_format(vocab: int, where: object) -> StreamFormat:
    """The authors' format. A vocabulary too small for its ids has them in its last rows.

    Raises UserError, naming ``where`` it comes from, if the vocabulary has fewer rows than that.
    """
    ids = {
        field.name: value
        for field in dataclasses.fields(RELEASE)
        if isinstance(value := getattr(RELEASE, field.name), (int, tuple))
    }
    flat = [i for value in ids.values() for i in (value if isinstance(value, tuple) else (value,))]
    shift = min(0, vocab - 1 - max(flat))
    if min(flat) + shift < 0:
        raise UserError(f"{where}: a vocabulary of {vocab} has no room for the authors' tokens")

    def moved(value: Any) -> Any:
        return tuple(map(moved, value)) if isinstance(value, tuple) else value + shift

    return dataclasses.replace(RELEASE, **{name: moved(value) for name, value in ids.items()})
