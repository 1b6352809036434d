"""Our implementation as a ``Runner``."""

from __future__ import annotations

import functools

import jax
import numpy as np
from flax import nnx

from ai_jax.config import ModelConfig
from ai_jax.convert import shards
from ai_jax.convert.files import progress
from ai_jax.convert.mapped import let_go
from ai_jax.convert.runners import chunk_tokens
from ai_jax.convert.source import Source
from ai_jax.model import omni
from ai_jax.model.cache import init_cache

# Two models of one shape share their programs: the weights are arguments.
_encode = jax.jit(omni.encode, static_argnums=0)
_extend = jax.jit(omni.extend, static_argnums=0, donate_argnums=2)


@functools.partial(jax.jit, static_argnums=0)
def _one_pass(graphdef, state, tokens_bt, audio_bnd):
    model = nnx.merge(graphdef, state)
    return model.logits(model.model(model.embed(tokens_bt, audio_bnd)))


class Ours:
    """The model of ``source`` with float32 weights, and a cache of ``max_len`` tokens."""

    def __init__(self, source: Source, max_len: int):
        self._config = config = source.config
        # The largest first: what is read and what is made of it are in memory together.
        names = sorted(source.params, key=lambda name: -source.specs[name].nbytes)
        size = sum(source.specs[name].nbytes for name in names)
        params = {}
        with progress(f"Loading {source.path.name}", size) as advance:
            for name, tensor in source.fetch(names):
                aligned = shards.aligned(tensor, np.dtype(np.float32))
                params[name] = jax.device_put(aligned, may_alias=True)
                advance(tensor.nbytes)
                let_go(tensor)
        self._graphdef, self._state = nnx.split(omni.build(config, params))
        self._cache = init_cache(config.text, 1, max_len)
        self._width = self._block(config)

    @staticmethod
    def _block(config: ModelConfig) -> int:
        """Tokens of the longest step: a chunk, and before it the prefix, or the end of a reply."""
        return len(chunk_tokens(config)) + max(2, len(config.stream.format.prefix([])))

    def one_pass(self, tokens: list[int], mel_cfm: np.ndarray) -> np.ndarray:
        audio_1nd = self._audio(mel_cfm)
        return np.asarray(_one_pass(self._graphdef, self._state, np.array([tokens]), audio_1nd))[0]

    def read(self, tokens: list[int], mel_fm: np.ndarray | None = None) -> np.ndarray:
        audio_1nd = None if mel_fm is None else self._audio(mel_fm[None])
        tokens_bt = np.zeros((1, 1 if mel_fm is None else self._width), np.int32)
        tokens_bt[0, : len(tokens)] = tokens
        lengths_b = np.array([len(tokens)], np.int32)
        logits_bv, self._cache = _extend(
            self._graphdef, self._state, self._cache, tokens_bt, audio_1nd, lengths_b
        )
        return np.asarray(logits_bv)[0]

    def _audio(self, mel_cfm: np.ndarray) -> jax.Array:
        frames = np.full(len(mel_cfm), mel_cfm.shape[1], np.int32)
        audio_cnd = _encode(self._graphdef, self._state, mel_cfm, frames)
        return audio_cnd.reshape(1, -1, audio_cnd.shape[-1])
