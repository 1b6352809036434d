"""Compiled steps of one model: encode a chunk, extend the cache, slide it.

The engine owns every call into JAX that serving makes. Its shapes come from a finite list, compiled
by :meth:`Engine.warm_up`: one chunk of mel, one block of tokens, one token, one slide.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ai_jax.config import ModelConfig
from ai_jax.errors import UserError
from ai_jax.model import omni
from ai_jax.model.cache import KVCache, init_cache, slide
from ai_jax.tokens import TextTokenizer


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What the decoder expects next.

    p_response: probability of ``<response>`` with every token but the two control tokens masked.
    text: likeliest token with every token masked that is neither text nor ``<eos>``.
    """

    p_response: float
    text: int


class Engine:
    """Runs one model for streams of batch 1; the sessions hold the caches."""

    def __init__(
        self,
        config: ModelConfig,
        params: omni.Params,
        tokenizer: TextTokenizer,
        *,
        dtype: jnp.dtype = jnp.float32,
    ):
        """``params`` in HF names; ``dtype`` of the computation and of the cache."""
        self.config = config
        self.tokenizer = tokenizer
        self.dtype = dtype
        fmt = config.stream.format
        self.chunk_tokens = fmt.chunk(config.audio.chunk_tokens)
        # The token that the last decision or reply left goes in front of the next chunk.
        self.block = len(self.chunk_tokens) + 1
        self.prefix = fmt.prefix(tokenizer.encode(config.stream.instruction))
        shortest = len(self.prefix) + 2 * self.block + config.stream.max_reply_tokens + 1
        if config.stream.max_len < shortest:
            raise UserError(
                f"stream.max_len must be at least {shortest} to hold the instruction, two chunks "
                f"and a reply (got {config.stream.max_len})"
            )
        # What load() aligned stays where it is.
        params = jax.device_put(params, may_alias=True)
        graphdef, self._state = nnx.split(omni.build(config, params, dtype))
        legal = jnp.asarray(_legal_text(config, tokenizer))
        self._encode = jax.jit(functools.partial(omni.encode, graphdef))
        self._extend = jax.jit(
            functools.partial(_predict, graphdef, fmt.silent, fmt.response, legal),
            donate_argnames="cache",
        )
        self._slide = jax.jit(functools.partial(slide, config.text), donate_argnums=0)

    def warm_up(self) -> None:
        """Compile every shape that a session can ask for."""
        c = self.config
        audio = self.encode(np.zeros((c.audio.chunk_frames, c.audio.num_mel_bins), np.float32))
        cache = self.new_cache()
        _, cache = self.extend(cache, self.chunk_tokens, audio)
        _, cache = self.extend(cache, [c.stream.format.silent])
        self.slide(cache, 0, 0)

    @property
    def compilations(self) -> int:
        """Programs compiled so far; constant after :meth:`warm_up`."""
        return sum(f._cache_size() for f in (self._encode, self._extend, self._slide))

    def new_cache(self) -> KVCache:
        return init_cache(self.config.text, 1, self.config.stream.max_len, self.dtype)

    def encode(self, mel_fm: np.ndarray) -> jax.Array:
        """Audio embeddings [n, d] of one whole chunk of log-mel [frames, mels]."""
        frames = np.array([len(mel_fm)], np.int32)
        return self._encode(self._state, mel_fm[None], frames)[0]

    def extend(
        self, cache: KVCache, tokens: Sequence[int], audio_nd: jax.Array | None = None
    ) -> tuple[Prediction, KVCache]:
        """Append ``tokens`` (at most ``block``; placeholders stand for ``audio_nd``) to the cache.

        The cache passed in is consumed. Returns what follows the last token.
        """
        width = 1 if len(tokens) == 1 else self.block
        tokens_bt = np.full((1, width), self.config.stream.format.pad, np.int32)
        tokens_bt[0, : len(tokens)] = tokens
        if audio_nd is None:
            shape = (self.config.audio.chunk_tokens, self.config.audio.output_dim)
            audio_nd = np.zeros(shape, self.dtype)
        lengths = np.array([len(tokens)], np.int32)
        p_b, text_b, cache = self._extend(
            self._state,
            tokens_bt=tokens_bt,
            audio_bnd=audio_nd[None],
            lengths_b=lengths,
            cache=cache,
        )
        return Prediction(float(p_b[0]), int(text_b[0])), cache

    def slide(self, cache: KVCache, prefix: int, drop: int) -> KVCache:
        """Remove the ``drop`` tokens that follow the first ``prefix``; consumes the cache."""
        return self._slide(cache, np.array([prefix], np.int32), np.array([drop], np.int32))


def _predict(graphdef, silent, response, legal_v, state, *, tokens_bt, audio_bnd, lengths_b, cache):
    logits_bv, cache = omni.extend(graphdef, state, cache, tokens_bt, audio_bnd, lengths_b)
    p_b = jax.nn.sigmoid(logits_bv[:, response] - logits_bv[:, silent])
    text_b = jnp.argmax(jnp.where(legal_v, logits_bv, -jnp.inf), axis=-1)
    return p_b, text_b, cache


def _legal_text(config: ModelConfig, tokenizer: TextTokenizer) -> np.ndarray:
    """Which ids may appear inside a reply: those that stand for bytes, and the one that ends it."""
    vocab = config.text.vocab_size
    legal = np.array([bool(tokenizer.token_bytes(i)) for i in range(vocab)])
    fmt = config.stream.format
    for i in (fmt.silent, fmt.response, fmt.eos, fmt.audio):
        if i >= vocab:
            raise UserError(f"the stream format uses token {i}, but the vocabulary ends at {vocab}")
    legal[fmt.eos] = True
    return legal
