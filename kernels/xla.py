"""The operation in plain JAX for any backend: scatters in place, attends to the whole buffers."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ai_jax.kernels.reference import Bias, Result, Rope, Scale, store


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
) -> Result:
    """``reference.chunk_attention`` for chunks of any length, without a copy of donated caches.

    Products have operands in the wider of q's and the cache's dtype, or in float32 for a float8
    cache, and are summed in float32.
    Values beyond a stream's length are multiplied by zero, so they must be finite.
    """
    t, s = q_bthd.shape[1], k_cache_bksd.shape[2]
    q, k, v = q_bthd, k_btkd, v_btkd
    if bias is not None:
        q, k, v = (x.astype(jnp.float32) + b for x, b in zip((q, k, v), bias, strict=True))
    if rope is not None:
        cos, sin = (x.astype(jnp.float32)[:, :, None] for x in rope)
        q, k = (rotate(x.astype(jnp.float32), cos, sin) for x in (q, k))
    q = q.astype(q_bthd.dtype)
    if scale is not None:
        k, v = (x.astype(jnp.float32) / y[:, None] for x, y in zip((k, v), scale, strict=True))

    end_b = cache_len_b + chunk_len_b
    fits_b = end_b <= s
    places_bt = append_places(cache_len_b, jnp.where(fits_b, chunk_len_b, 0), t, s)
    k_cache_bksd, v_cache_bksd = (
        append(cache, store(x, cache.dtype), places_bt)
        for cache, x in ((k_cache_bksd, k), (v_cache_bksd, v))
    )
    query_bt = cache_len_b[:, None] + jnp.arange(t)
    wide = jnp.float32 if scale is not None else k_cache_bksd.dtype
    dtype = jnp.promote_types(q.dtype, wide)
    keys, values = (x.astype(dtype) for x in (k_cache_bksd, v_cache_bksd))
    if scale is not None:
        q = q.astype(jnp.float32) * per_query_head(scale.k_k, q)
    mask_bts = jnp.arange(s) <= query_bt[..., None]
    out_bthd = attention(q.astype(dtype), keys, values, mask_bts)
    if scale is not None:
        out_bthd = out_bthd * per_query_head(scale.v_k, q)
    out_bthd = jnp.where(fits_b[:, None, None, None], out_bthd, jnp.nan)
    valid_bt = jnp.arange(t) < chunk_len_b[:, None]
    out_bthd = jnp.where(valid_bt[..., None, None], out_bthd, 0)
    return Result(out_bthd.astype(q_bthd.dtype), k_cache_bksd, v_cache_bksd)


def attention(
    q_bthd: jax.Array, k_bksd: jax.Array, v_bksd: jax.Array, mask_bts: jax.Array | None
) -> jax.Array:
    """Softmax attention with grouped queries: query head i reads key head ``i // (h / k)``.

    mask_bts: bool, True where query t may read key s; None allows all. Returns [b, t, h, d] in
    q's dtype. Softmax is in float32.
    """
    b, t, h, d = q_bthd.shape
    k, s = k_bksd.shape[1:3]
    q_bkgtd = q_bthd.reshape(b, t, k, h // k, d).transpose(0, 2, 3, 1, 4)
    q_bkrd = q_bkgtd.reshape(b, k, -1, d)  # r: the rows (g, t) that share a key head
    scores_bkrs = jnp.einsum("bkrd,bksd->bkrs", q_bkrd, k_bksd, preferred_element_type=jnp.float32)
    scores_bkgts = scores_bkrs.reshape(b, k, h // k, t, s) * d**-0.5
    if mask_bts is not None:
        low = jnp.finfo(jnp.float32).min
        scores_bkgts = jnp.where(mask_bts[:, None, None], scores_bkgts, low)
    p_bkrs = jax.nn.softmax(scores_bkgts, axis=-1).astype(q_bthd.dtype).reshape(b, k, -1, s)
    o_bkrd = jnp.einsum("bkrs,bksd->bkrd", p_bkrs, v_bksd, preferred_element_type=jnp.float32)
    o_bkgtd = o_bkrd.astype(q_bthd.dtype).reshape(b, k, h // k, t, d)
    return o_bkgtd.transpose(0, 3, 1, 2, 4).reshape(b, t, h, d)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn the pairs (x[i], x[i + d/2]) of the last axis by angles of cosines/sines [..., d/2]."""
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def append_places(start_b: jax.Array, count_b: jax.Array, t: int, max_len: int) -> jax.Array:
    """Places in the buffer of ``t`` new tokens, int32 [b, t]: ``start_b`` onwards.

    Tokens beyond ``count_b`` get places outside of the buffer, where ``append`` drops them.
    """
    i_t = jnp.arange(t)
    return jnp.where(i_t < count_b[:, None], start_b[:, None] + i_t, max_len + i_t)


def append(buffer_bksd: jax.Array, new_btkd: jax.Array, places_bt: jax.Array) -> jax.Array:
    """Put rows at ``places_bt`` of the buffer, in place where the buffer is donated."""
    rows_b1 = jnp.arange(buffer_bksd.shape[0])[:, None]
    return buffer_bksd.at[rows_b1, :, places_bt].set(
        new_btkd, mode="drop", unique_indices=True, indices_are_sorted=True
    )


def per_query_head(scale_k: jax.Array, q_bthd: jax.Array) -> jax.Array:
    """A number of each KV head for each query head that reads it, [h, 1]."""
    return jnp.repeat(scale_k, q_bthd.shape[2] // scale_k.shape[0])[:, None]
