"""SpecAugment on the log-mel of a batch, from a PRNG key, inside the compiled step."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ai_jax.train.stages import SpecAugmentConfig


def spec_augment(mel_bcfm: jax.Array, key: jax.Array, config: SpecAugmentConfig) -> jax.Array:
    """Fill random bands of mel bins and spans of frames of each stream with that stream's mean.

    mel_bcfm: float32 [batch, chunks, frames, mels]; frames of successive chunks are contiguous, so
    a span may cross chunks. Returns the same shape and dtype.
    """
    if not config.time_masks and not config.mel_masks:
        return mel_bcfm
    b, c, f, m = mel_bcfm.shape
    time_key, mel_key = jax.random.split(key)
    time_bt = _spans(time_key, b, config.time_masks, config.time_width, c * f)
    mel_bm = _spans(mel_key, b, config.mel_masks, config.mel_width, m)
    masked = time_bt.reshape(b, c, f, 1) | mel_bm[:, None, None, :]
    mean = jnp.mean(mel_bcfm, axis=(1, 2, 3), keepdims=True)
    return jnp.where(masked, mean, mel_bcfm)


def _spans(key: jax.Array, batch: int, masks: int, width: int, size: int) -> jax.Array:
    """bool [batch, size]: the union of ``masks`` spans, each 0..width long, anywhere inside."""
    width_key, start_key = jax.random.split(key)
    width_bn = jax.random.randint(width_key, (batch, masks, 1), 0, min(width, size) + 1)
    start_bn = jnp.floor(jax.random.uniform(start_key, (batch, masks, 1)) * (size - width_bn + 1))
    at = jnp.arange(size)
    return jnp.any((at >= start_bn) & (at < start_bn + width_bn), axis=1)
