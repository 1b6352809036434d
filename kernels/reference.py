"""The operation in plain jnp: the single definition of what is right."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Bias(NamedTuple):
    """Biases of the projections, added before RoPE: [h, d], [k, d], [k, d]."""

    q_hd: jax.Array
    k_kd: jax.Array
    v_kd: jax.Array


class Rope(NamedTuple):
    """Cosines and sines of the chunk's positions, [b, t, d / 2], or [1, t, d / 2] for all rows."""

    cos_btr: jax.Array
    sin_btr: jax.Array


class Scale(NamedTuple):
    """What one unit of a float8 cache stands for, float32 [k]: stored value = value / scale."""

    k_k: jax.Array
    v_k: jax.Array


class Result(NamedTuple):
    """Attention of the chunk [b, t, h, d] in q's dtype, and the caches with the chunk appended."""

    out_bthd: jax.Array
    k_cache_bksd: jax.Array
    v_cache_bksd: jax.Array


def chunk_attention(
    q_bthd: jax.Array,
    k_btkd: jax.Array,
    v_btkd: jax.Array,
    k_cache_bksd: jax.Array,
    v_cache_bksd: jax.Array,
    cache_len_b: jax.Array,
    chunk_len_b: jax.Array,
    *,
    bias: Bias | None = None,
    rope: Rope | None = None,
    scale: Scale | None = None,
    dtype: jnp.dtype = jnp.float32,
) -> Result:
    """Append each stream's chunk to its cache, then let the chunk attend to cache and chunk.

    q, k, v: the chunk after its projections, right-padded; with ``bias`` and ``rope`` before them.
    cache_len_b, chunk_len_b: int32 [b], tokens held by the cache and valid tokens of the chunk.
    Row ``t`` of stream ``b`` reads places ``0 .. cache_len + t`` of the new cache::

        q' = round_q(rope(q + bias)),   k' = round_cache(rope(k + bias) / k_scale),   v' likewise
        out = softmax(q' k'^T k_scale / sqrt(d)) v' v_scale

    Query head ``i`` reads KV head ``i // (h / k)``. Places beyond a stream's length are neither
    read nor written and may hold anything. Rows ``t >= chunk_len`` give zeros. A stream whose
    cache would outgrow its buffer is refused: nothing is appended and its valid rows give NaN.

    dtype: of the computation, float32, or float64 under ``jax.enable_x64(True)``.
    """
    t, s = q_bthd.shape[1], k_cache_bksd.shape[2]
    groups = q_bthd.shape[2] // k_btkd.shape[2]
    q, k, v = (x.astype(dtype) for x in (q_bthd, k_btkd, v_btkd))
    if bias is not None:
        q, k, v = (x + b.astype(dtype) for x, b in zip((q, k, v), bias, strict=True))
    if rope is not None:
        q, k = (rotate(x, rope, dtype) for x in (q, k))
    k_scale_k, v_scale_k = (
        (jnp.ones(k.shape[2], dtype),) * 2 if scale is None else (x.astype(dtype) for x in scale)
    )
    q = q.astype(q_bthd.dtype).astype(dtype)
    k = store(k / k_scale_k[:, None], k_cache_bksd.dtype)
    v = store(v / v_scale_k[:, None], v_cache_bksd.dtype)

    end_b = cache_len_b + chunk_len_b
    fits_b = end_b <= s
    place_s = jnp.arange(s)
    slot_bs = place_s - cache_len_b[:, None]  # which row of the chunk belongs to a place
    append_bs = (slot_bs >= 0) & (slot_bs < chunk_len_b[:, None]) & fits_b[:, None]
    index_bks = jnp.clip(slot_bs, 0, t - 1)[:, None, :, None]

    def append(cache_bksd, new_btkd):
        rows_bksd = jnp.take_along_axis(new_btkd.transpose(0, 2, 1, 3), index_bks, axis=2)
        return jnp.where(append_bs[:, None, :, None], rows_bksd, cache_bksd)

    k_cache_bksd, v_cache_bksd = append(k_cache_bksd, k), append(v_cache_bksd, v)

    held_bs = place_s < end_b[:, None]
    keys, values = (
        jnp.repeat(
            jnp.where(held_bs[:, None, :, None], x.astype(dtype), 0) * x_scale[:, None, None],
            groups,
            axis=1,
        )
        for x, x_scale in ((k_cache_bksd, k_scale_k), (v_cache_bksd, v_scale_k))
    )
    high = jax.lax.Precision.HIGHEST
    scores_bhts = jnp.einsum("bthd,bhsd->bhts", q, keys, precision=high) * q.shape[-1] ** -0.5
    visible_bts = place_s <= (cache_len_b[:, None] + jnp.arange(t))[..., None]
    scores_bhts = jnp.where(visible_bts[:, None], scores_bhts, -jnp.inf)
    p_bhts = jax.nn.softmax(scores_bhts, axis=-1)
    out_bthd = jnp.einsum("bhts,bhsd->bthd", p_bhts, values, precision=high)
    valid_bt = jnp.arange(t) < chunk_len_b[:, None]
    out_bthd = jnp.where(fits_b[:, None, None, None], out_bthd, jnp.nan)
    out_bthd = jnp.where(valid_bt[..., None, None], out_bthd, 0)
    return Result(out_bthd.astype(q_bthd.dtype), k_cache_bksd, v_cache_bksd)


def rotate(x_btnd: jax.Array, rope: Rope, dtype: jnp.dtype) -> jax.Array:
    """RoPE on both halves of the last axis: ``(a, b) -> (a cos - b sin, b cos + a sin)``."""
    cos, sin = (x.astype(dtype)[:, :, None] for x in rope)
    a, b = jnp.split(x_btnd, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def store(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Round to the cache's dtype; float8 saturates, it has no infinity."""
    if dtype == jnp.float8_e4m3fn:
        limit = float(jnp.finfo(dtype).max)
        x = jnp.clip(x, -limit, limit)
    return x.astype(dtype)
