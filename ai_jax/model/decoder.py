"""Decoder of Qwen2.5: grouped-query attention with RoPE, RMSNorm, SwiGLU.

Audio and text without vision make the three axes of Qwen2.5-Omni's TMRoPE equal, so a position is
one counter.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ai_jax.config import TextConfig
from ai_jax.kernels import Rope, chunk_attention
from ai_jax.kernels.xla import rotate
from ai_jax.model.cache import KVCache
from ai_jax.model.layers import (
    DType,
    Embedding,
    Linear,
    RMSNorm,
    apply_layers,
    causal_attention,
    make_layers,
    rope_angles,
    rope_positions,
    silu,
)

KV = tuple[jax.Array, jax.Array]  # keys and values, [b, k, s, head_dim]


class Attention(nnx.Module):
    """Causal attention; biases on q, k and v only."""

    def __init__(self, config: TextConfig, **kwargs: Any):
        width, d = config.hidden_size, config.head_dim
        self.q_proj = Linear(width, config.num_attention_heads * d, bias=True, **kwargs)
        self.k_proj = Linear(width, config.num_key_value_heads * d, bias=True, **kwargs)
        self.v_proj = Linear(width, config.num_key_value_heads * d, bias=True, **kwargs)
        self.o_proj = Linear(config.num_attention_heads * d, width, bias=False, **kwargs)
        self.head_dim = d

    def _project(self, x_btd: jax.Array) -> list[jax.Array]:
        """Queries, keys and values before RoPE, [b, t, heads, head_dim]."""
        return [
            proj(x_btd).reshape(*x_btd.shape[:2], -1, self.head_dim)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        ]

    def __call__(self, x_btd: jax.Array, rope: Rope) -> jax.Array:
        """Causal attention among the given positions alone."""
        q, k, v = self._project(x_btd)
        cos, sin = (x[:, :, None].astype(q.dtype) for x in rope)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = causal_attention(q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3))
        return self.o_proj(out)

    def extend(
        self, x_btd: jax.Array, rope: Rope, kv: KV, length_b: jax.Array, count_b: jax.Array
    ) -> tuple[jax.Array, KV]:
        """Append ``count_b`` rows to buffers that hold ``length_b``, then attend to the buffers."""
        out, *kv = chunk_attention(*self._project(x_btd), *kv, length_b, count_b, rope=rope)
        return self.o_proj(out.reshape(*x_btd.shape[:2], -1)), tuple(kv)


class MLP(nnx.Module):
    """SwiGLU."""

    def __init__(self, config: TextConfig, **kwargs: Any):
        width, hidden = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(width, hidden, bias=False, **kwargs)
        self.up_proj = Linear(width, hidden, bias=False, **kwargs)
        self.down_proj = Linear(hidden, width, bias=False, **kwargs)

    def __call__(self, x_btd: jax.Array) -> jax.Array:
        return self.down_proj(silu(self.gate_proj(x_btd)) * self.up_proj(x_btd))


class DecoderLayer(nnx.Module):
    """Pre-norm transformer layer."""

    def __init__(self, config: TextConfig, *, rngs: nnx.Rngs, dtype: DType, param_dtype: DType):
        kwargs = {"rngs": rngs, "dtype": dtype, "param_dtype": param_dtype}
        norm = {"eps": config.rms_norm_eps, "dtype": dtype, "param_dtype": param_dtype}
        self.self_attn = Attention(config, **kwargs)
        self.mlp = MLP(config, **kwargs)
        self.input_layernorm = RMSNorm(config.hidden_size, **norm)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, **norm)

    def __call__(self, x_btd: jax.Array, rope: Rope) -> jax.Array:
        x_btd = x_btd + self.self_attn(self.input_layernorm(x_btd), rope)
        return x_btd + self.mlp(self.post_attention_layernorm(x_btd))

    def extend(
        self, x_btd: jax.Array, rope: Rope, kv: KV, length_b: jax.Array, count_b: jax.Array
    ) -> tuple[jax.Array, KV]:
        out, kv = self.self_attn.extend(self.input_layernorm(x_btd), rope, kv, length_b, count_b)
        x_btd = x_btd + out
        return x_btd + self.mlp(self.post_attention_layernorm(x_btd)), kv


class Decoder(nnx.Module):
    """Token embedding, layers and final norm; ``lm_head`` lies outside, as in Hugging Face's.

    stacked: hold the weights of all layers in one, with a leading axis (see ``apply_layers``).
    """

    def __init__(
        self,
        config: TextConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DType = jnp.float32,
        param_dtype: DType = jnp.float32,
        stacked: bool = False,
    ):
        kwargs = {"rngs": rngs, "dtype": dtype, "param_dtype": param_dtype}
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, **kwargs)
        self.layers = make_layers(
            lambda: DecoderLayer(config, **kwargs), config.num_hidden_layers, stacked
        )
        self.norm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, dtype=dtype, param_dtype=param_dtype
        )
        self.config = config

    def __call__(self, x_btd: jax.Array, *, remat: bool = False, unroll: bool = False) -> jax.Array:
        """One causal pass over whole streams: embeddings [b, t, d] -> hidden states [b, t, d]."""
        rope = self._rope(jnp.arange(x_btd.shape[1])[None])
        return self.norm(apply_layers(self.layers, x_btd, rope, remat=remat, unroll=unroll))

    def extend(
        self, x_btd: jax.Array, cache: KVCache, lengths_b: jax.Array
    ) -> tuple[jax.Array, KVCache]:
        """Read ``lengths_b`` more tokens of each row into the cache.

        x_btd: embeddings, right-padded. Returns the hidden states [b, t, d] (NaN in a row that
        would outgrow the cache, which must slide first) and the cache.
        """
        rope = self._rope(cache.length_b[:, None] + jnp.arange(x_btd.shape[1]))
        keys, values = [], []
        for layer, *kv in zip(self.layers, cache.k, cache.v, strict=True):
            x_btd, (k, v) = layer.extend(x_btd, rope, tuple(kv), cache.length_b, lengths_b)
            keys.append(k)
            values.append(v)
        length_b = cache.length_b + lengths_b
        return self.norm(x_btd), KVCache(k=tuple(keys), v=tuple(values), length_b=length_b)

    def _rope(self, places_bt: jax.Array) -> Rope:
        positions_bt = rope_positions(places_bt, self.config.fp16_positions)
        angles = rope_angles(positions_bt, self.config.head_dim, self.config.rope_theta)
        return Rope(jnp.cos(angles), jnp.sin(angles))
