"""transformers' Qwen2.5-Omni thinker with random weights, and the same weights in our model."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import torch
from transformers import Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration

from ai_jax.config import ModelConfig


def thinker_config(config: ModelConfig) -> Qwen2_5OmniThinkerConfig:
    """transformers' config of a model of ours, with the smallest vision tower that it accepts."""
    text = dataclasses.asdict(config.text)
    half = config.text.head_dim // 2
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": text.pop("rope_theta"),
        "mrope_section": [half - 2 * (half // 3), half // 3, half // 3],
    }
    vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1}
    vision |= {"out_hidden_size": config.text.hidden_size, "fullatt_block_indexes": [0]}
    return Qwen2_5OmniThinkerConfig(
        audio_config=dataclasses.asdict(config.audio),
        text_config=text,
        vision_config=vision,
        audio_token_index=config.stream.format.audio,
        image_token_index=config.text.vocab_size - 1,
        video_token_index=config.text.vocab_size - 2,
        tie_word_embeddings=config.text.tie_word_embeddings,
    )


def thinker(config: ModelConfig, seed: int = 0) -> Qwen2_5OmniThinkerForConditionalGeneration:
    """A float32 thinker in which every weight, biases and norms too, is random and matters."""
    torch.manual_seed(seed)
    model = Qwen2_5OmniThinkerForConditionalGeneration._from_config(
        thinker_config(config), attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                is_scale = name.endswith("weight")
                weight.normal_(1.0 if is_scale else 0.0, 0.1)
            else:
                weight.normal_(0.0, weight[0].numel() ** -0.5)
    return model


def params_of(model: torch.nn.Module, config: ModelConfig) -> dict:
    """Our ``Params`` of a thinker: the names of its checkpoint, without the vision tower."""
    params = {}
    for name, value in model.state_dict().items():
        name = name.replace("model.language_model.", "model.")
        name = name.replace("model.audio_tower.", "audio_tower.")
        tied = config.text.tie_word_embeddings and name == "lm_head.weight"
        if not name.startswith("model.visual.") and not tied:
            params[name] = jnp.asarray(value.numpy())
    return params


def encode(model: torch.nn.Module, mel_fm: np.ndarray, lengths: list[int]) -> np.ndarray:
    """transformers' audio encoder on clips of ``lengths`` frames laid end to end."""
    with torch.no_grad():
        out = model.model.audio_tower(torch.tensor(mel_fm).T, feature_lens=torch.tensor(lengths))
    return out.last_hidden_state.numpy()


def logits(model: torch.nn.Module, tokens: list[int], mel_fm: np.ndarray) -> np.ndarray:
    """transformers' logits [t, v] of one stream with one clip."""
    with torch.no_grad():
        out = model(
            input_ids=torch.tensor([tokens]),
            input_features=torch.tensor(mel_fm).T[None],
            feature_attention_mask=torch.ones(1, len(mel_fm), dtype=torch.long),
        )
    return out.logits[0].numpy()
