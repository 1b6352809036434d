"""The Audio Interaction Model: weights in and out, serving steps, and the training pass.

A model's weights are, at every boundary, one flat dict of arrays under Hugging Face's names (less
the prefix ``thinker.``) and in PyTorch's layouts: ``Params``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from ai_jax.config import ModelConfig
from ai_jax.errors import UserError
from ai_jax.model.audio_encoder import AudioEncoder
from ai_jax.model.cache import KVCache
from ai_jax.model.decoder import Decoder
from ai_jax.model.layers import DType, Linear, dot

Params = dict[str, jax.Array]


class AudioInteractionModel(nnx.Module):
    """Audio encoder, decoder and ``lm_head`` (absent where ``tie_word_embeddings``).

    dtype: of the computation. param_dtype: of the weights. stacked: hold the weights of all layers
    of a stack in one layer, with a leading axis (the view that training scans over).
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DType = jnp.float32,
        param_dtype: DType = jnp.float32,
        stacked: bool = False,
    ):
        kwargs = {"rngs": rngs, "dtype": dtype, "param_dtype": param_dtype}
        self.audio_tower = AudioEncoder(config.audio, stacked=stacked, **kwargs)
        self.model = Decoder(config.text, stacked=stacked, **kwargs)
        if not config.text.tie_word_embeddings:
            width, vocab = config.text.hidden_size, config.text.vocab_size
            self.lm_head = Linear(width, vocab, bias=False, **kwargs)
        self.config = config

    def embed(self, tokens_bt: jax.Array, audio_bnd: jax.Array | None) -> jax.Array:
        """Token embeddings [b, t, d]; the i-th placeholder of a row takes the i-th audio vector."""
        x_btd = self.model.embed_tokens(tokens_bt)
        if audio_bnd is None:
            return x_btd
        is_audio_bt = tokens_bt == self.config.stream.format.audio
        index_bt = jnp.clip(jnp.cumsum(is_audio_bt, axis=1) - 1, 0, audio_bnd.shape[1] - 1)
        audio_btd = jnp.take_along_axis(audio_bnd, index_bt[..., None], axis=1)
        return jnp.where(is_audio_bt[..., None], audio_btd.astype(x_btd.dtype), x_btd)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 [..., vocab_size] of hidden states [..., d]."""
        tied = self.config.text.tie_word_embeddings
        head = self.model.embed_tokens if tied else self.lm_head
        return dot(hidden, head.weight[...])


# Weights.


def init_params(config: ModelConfig, seed: int, param_dtype: DType = jnp.float32) -> Params:
    """Random weights: normal(0, 0.02), zero biases, unit norms. The same seed, the same bits."""
    return get_params(AudioInteractionModel(config, rngs=nnx.Rngs(seed), param_dtype=param_dtype))


def abstract_params(
    config: ModelConfig, dtype: DType = jnp.float32
) -> dict[str, jax.ShapeDtypeStruct]:
    """Names, shapes and dtype of the weights, without any memory."""
    return jax.eval_shape(lambda: init_params(config, 0, dtype))


def build(config: ModelConfig, params: Params, dtype: DType = jnp.float32) -> AudioInteractionModel:
    """The model that holds these arrays (no copy) and computes in ``dtype``.

    Raises UserError that names a weight which is missing, unknown or of another shape.
    """
    expected = abstract_params(config)
    for name in sorted(expected.keys() | params.keys()):
        if name not in params:
            raise UserError(f"the weight '{name}' is missing for the model '{config.name}'")
        if name not in expected:
            raise UserError(f"the weight '{name}' is unknown to the model '{config.name}'")
        got, want = tuple(params[name].shape), expected[name].shape
        if got != want:
            raise UserError(f"the weight '{name}' has shape {got}, the config says {want}")
    return nnx.merge(_graphdef(config, dtype, stacked=False), _to_state(params))


def get_params(model: nnx.Module) -> Params:
    """The weights of a model or of a part of it; the inverse of ``build``."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): param[...] for path, param in flat}


def stack_layers(params: Mapping[str, jax.Array]) -> Params:
    """The view that training scans over: ``*.layers.N.x`` become ``*.layers.x`` [layers, ...]."""
    stacked, stacks = {}, {}
    for name, value in params.items():
        match = _LAYER.fullmatch(name)
        if match is None:
            stacked[name] = value
        else:
            stacks.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = value
    for name, by_layer in stacks.items():
        stacked[name] = jnp.stack([by_layer[i] for i in range(len(by_layer))])
    return stacked


def unstack_layers(stacked: Mapping[str, jax.Array]) -> Params:
    """The inverse of ``stack_layers``."""
    params = {}
    for name, value in stacked.items():
        head, layers, tail = name.partition(".layers.")
        if not layers:
            params[name] = value
        else:
            params |= {f"{head}.layers.{i}.{tail}": value[i] for i in range(value.shape[0])}
    return params


_LAYER = re.compile(r"(.*\.layers)\.(\d+)\.(.*)")


@functools.lru_cache(maxsize=32)
def _graphdef(config: ModelConfig, dtype: DType, *, stacked: bool) -> nnx.GraphDef:
    def make():
        return AudioInteractionModel(config, rngs=nnx.Rngs(0), dtype=dtype, stacked=stacked)

    return nnx.split(nnx.eval_shape(make))[0]


def _to_state(params: Mapping[str, jax.Array]) -> nnx.State:
    def path(name):
        return tuple(int(part) if part.isdigit() else part for part in name.split("."))

    return nnx.from_flat_state({path(name): value for name, value in params.items()})


# Serving: pure functions of (graphdef, state) = nnx.split(model), for the caller to jit.


def encode(
    graphdef: nnx.GraphDef, state: nnx.State, mel_bfm: jax.Array, frames_b: jax.Array
) -> jax.Array:
    """Audio vectors [b, n, d] of one chunk per row; see ``AudioEncoder.__call__``.

    mel_bfm: float32 [b, chunk_frames, mels]; frames_b: int [b], valid frames of each row.
    """
    return nnx.merge(graphdef, state).audio_tower(mel_bfm, frames_b)


def extend(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    cache: KVCache,
    tokens_bt: jax.Array,
    audio_bnd: jax.Array | None,
    lengths_b: jax.Array,
) -> tuple[jax.Array, KVCache]:
    """Read tokens into the cache and return the logits that follow them (Extend of Algorithm 3).

    tokens_bt: int [b, t], right-padded; ``lengths_b`` of them are valid, at least 1 where the
    logits are to be used. Placeholders for audio take the vectors of ``audio_bnd`` [b, n, d] in
    order. Returns float32 logits [b, v] at the last valid token of each row, and the cache. Donate
    the cache, and it is updated in place. A row that would outgrow it gives NaN: slide it first.
    """
    model = nnx.merge(graphdef, state)
    hidden_btd, cache = model.model.extend(model.embed(tokens_bt, audio_bnd), cache, lengths_b)
    last_b11 = jnp.maximum(lengths_b - 1, 0)[:, None, None]
    return model.logits(jnp.take_along_axis(hidden_btd, last_b11, axis=1)[:, 0]), cache


# Training: pure functions of the stacked weights.


def forward(
    config: ModelConfig,
    stacked_params: Params,
    tokens_bt: jax.Array,
    mel_bcfm: jax.Array,
    *,
    dtype: DType = jnp.float32,
    remat: bool = True,
    scan: bool = True,
    frozen_layers: int = 0,
) -> jax.Array:
    """One teacher-forced pass over whole streams: hidden states [b, t, d] after the final norm.

    stacked_params: from ``stack_layers``. tokens_bt: int [b, t] with ``c * chunk_tokens``
    placeholders for audio in each row. mel_bcfm: float32 [b, c, chunk_frames, mels]. remat: keep
    only the results of matrix products for the backward pass. scan: loop over layers in the
    compiled program; False unrolls it, which compiles longer. frozen_layers: no gradient flows
    into so many lower layers of the audio tower, nor into its convolutions.
    """
    model = nnx.merge(_graphdef(config, dtype, stacked=True), _to_state(stacked_params))
    b, c = mel_bcfm.shape[:2]
    how = {"remat": remat, "unroll": not scan}
    mel_bfm = mel_bcfm.reshape(b * c, *mel_bcfm.shape[2:])
    audio = model.audio_tower(mel_bfm, frozen_layers=frozen_layers, **how)
    audio_bnd = audio.reshape(b, -1, audio.shape[-1])
    return model.model(model.embed(tokens_bt, audio_bnd), **how)


def unembed(config: ModelConfig, params: Params, hidden: jax.Array) -> jax.Array:
    """float32 logits [..., v] of hidden states [..., d]; takes stacked weights or plain ones."""
    tied = config.text.tie_word_embeddings
    return dot(hidden, params["model.embed_tokens.weight" if tied else "lm_head.weight"])
