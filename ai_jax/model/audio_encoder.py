"""Audio encoder of Qwen2.5-Omni: each chunk of mel frames becomes a few vectors for the decoder.

Chunks know nothing of each other (positions restart, attention stays inside), so chunks are simply
the batch axis: of one stream over time when training, of many sessions when serving.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ai_jax.config import AudioConfig
from ai_jax.model.layers import (
    Conv1d,
    DType,
    Embedding,
    LayerNorm,
    Linear,
    apply_layers,
    attention,
    gelu,
    make_layers,
)


def audio_tokens(frames: Any) -> Any:
    """Audio tokens that a chunk of ``frames`` mel frames gives: 40 -> 10, 3 -> 1, 2 -> 0.

    Works on ints and on integer arrays.
    """
    return _after_conv(frames) // 2


def _after_conv(frames: Any) -> Any:
    return (frames + 1) // 2


class AudioAttention(nnx.Module):
    """Attention of all positions of a chunk to all; ``k_proj`` has no bias."""

    def __init__(self, config: AudioConfig, **kwargs: Any):
        width = config.d_model
        self.q_proj = Linear(width, width, bias=True, **kwargs)
        self.k_proj = Linear(width, width, bias=False, **kwargs)
        self.v_proj = Linear(width, width, bias=True, **kwargs)
        self.out_proj = Linear(width, width, bias=True, **kwargs)
        self.heads = config.encoder_attention_heads

    def __call__(self, x_btd: jax.Array, mask_bts: jax.Array | None) -> jax.Array:
        q, k, v = (
            proj(x_btd).reshape(*x_btd.shape[:2], self.heads, -1)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = attention(q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), mask_bts)
        return self.out_proj(out)


class AudioLayer(nnx.Module):
    """Pre-norm transformer layer."""

    def __init__(self, config: AudioConfig, *, dtype: DType, param_dtype: DType, rngs: nnx.Rngs):
        kwargs = {"rngs": rngs, "dtype": dtype, "param_dtype": param_dtype}
        norm = {"dtype": dtype, "param_dtype": param_dtype}
        self.self_attn = AudioAttention(config, **kwargs)
        self.self_attn_layer_norm = LayerNorm(config.d_model, **norm)
        self.fc1 = Linear(config.d_model, config.encoder_ffn_dim, bias=True, **kwargs)
        self.fc2 = Linear(config.encoder_ffn_dim, config.d_model, bias=True, **kwargs)
        self.final_layer_norm = LayerNorm(config.d_model, **norm)

    def __call__(self, x_btd: jax.Array, mask_bts: jax.Array | None) -> jax.Array:
        x_btd = x_btd + self.self_attn(self.self_attn_layer_norm(x_btd), mask_bts)
        return x_btd + self.fc2(gelu(self.fc1(self.final_layer_norm(x_btd))))


class AudioEncoder(nnx.Module):
    """Conv stem, sinusoidal positions, transformer, mean of pairs, ``ln_post``, ``proj``.

    stacked: hold the weights of all layers in one, with a leading axis (see ``apply_layers``).
    """

    def __init__(
        self,
        config: AudioConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DType = jnp.float32,
        param_dtype: DType = jnp.float32,
        stacked: bool = False,
    ):
        width = config.d_model
        kwargs = {"rngs": rngs, "dtype": dtype, "param_dtype": param_dtype}
        self.conv1 = Conv1d(config.num_mel_bins, width, stride=1, **kwargs)
        self.conv2 = Conv1d(width, width, stride=2, **kwargs)
        # The offline model frames audio with these two rows; no forward pass reads them.
        self.audio_bos_eos_token = Embedding(2, config.output_dim, **kwargs)
        self.layers = make_layers(
            lambda: AudioLayer(config, **kwargs), config.encoder_layers, stacked
        )
        self.ln_post = LayerNorm(width, dtype=dtype, param_dtype=param_dtype)
        self.proj = Linear(width, config.output_dim, bias=True, **kwargs)
        self.dtype = dtype

    def __call__(
        self,
        mel_bfm: jax.Array,
        frames_b: jax.Array | None = None,
        *,
        frozen_layers: int = 0,
        remat: bool = False,
        unroll: bool = False,
    ) -> jax.Array:
        """Encode one chunk per row.

        mel_bfm: float [b, frames, mels]. frames_b: int [b], valid frames of each row (None: all);
        what follows them is ignored. frozen_layers: stop gradients behind so many layers (0:
        nowhere). Returns [b, audio_tokens(frames), output_dim]; row i has
        ``audio_tokens(frames_b[i])`` valid tokens, the others are zero.
        """
        mask_bts = None
        if frames_b is None:
            x_btd = gelu(self.conv2(gelu(self.conv1(mel_bfm))))
        else:
            valid_bf1 = _below(frames_b, mel_bfm.shape[1])[..., None]
            x_bfd = gelu(self.conv1(jnp.where(valid_bf1, mel_bfm, 0)))
            # To the second convolution, padding must look like the end of the chunk.
            x_btd = gelu(self.conv2(x_bfd * valid_bf1))
            mask_bts = _below(_after_conv(frames_b), x_btd.shape[1])[:, None, :]
        x_btd = x_btd + jnp.asarray(_sinusoids(*x_btd.shape[1:]), self.dtype)
        how = {"remat": remat, "unroll": unroll, "frozen": frozen_layers}
        x_btd = apply_layers(self.layers, x_btd, mask_bts, **how)
        b, t, d = x_btd.shape
        x_bnd = x_btd[:, : t // 2 * 2].reshape(b, t // 2, 2, d).astype(jnp.float32).mean(2)
        x_bnd = self.ln_post(x_bnd.astype(self.dtype))
        audio_bnd = self.proj(x_bnd)
        if frames_b is None:
            return audio_bnd
        return jnp.where(_below(audio_tokens(frames_b), t // 2)[..., None], audio_bnd, 0)


def _below(lengths_b: jax.Array, size: int) -> jax.Array:
    """Bool [b, size], True at the first ``lengths_b`` places of each row."""
    return jnp.arange(size) < lengths_b[:, None]


def _sinusoids(length: int, width: int) -> np.ndarray:
    """Positions of a chunk, float32 [length, width]: the sines, then the cosines (Whisper's)."""
    step = np.log(10000) / (width // 2 - 1)
    inv_timescales = np.exp(np.float32(-step) * np.arange(width // 2, dtype=np.float32))
    angle = np.arange(length, dtype=np.float32)[:, None] * inv_timescales
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=1)
