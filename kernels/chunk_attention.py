"""Triton kernels: append a chunk's keys and values to the cache and attend, ragged and grouped.

Layouts (all contiguous): q, out [B, T, KV * G, D]; k, v [B, T, KV, D]; caches [B, KV, S, D];
cos, sin [B or 1, T, D / 2]; cache_len, chunk_len int32 [B]. ``kernels/reference.py`` defines the
result. Keys are read in two halves of D, because RoPE then needs no shuffle within a tile.

A tile holds all query rows (chunk row t, group g) of one KV head, so each key is read once. The
cache is cut in pieces of SPLIT places, a fixed number: what a stream yields depends neither on its
neighbours nor on their lengths. Arguments that are None are left out of the compiled signature.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Stands for minus infinity: a row that sees nothing of a piece must yield a number, with weight 0.
LOW = tl.constexpr(-1.0e30)
FP8_MAX = tl.constexpr(448.0)
BLOCK_T = tl.constexpr(16)  # rows of a chunk, padded to the least side of a matrix product


@triton.jit
def _rotated(a, b, cos, sin, at, mask):
    """RoPE of the two halves of rows whose cosines lie at ``at``."""
    c = tl.load(cos + at, mask, 0.0).to(tl.float32)
    s = tl.load(sin + at, mask, 0.0).to(tl.float32)
    return a * c - b * s, b * c + a * s


@triton.jit
def _load_halves(x, bias, cos, sin, at, at_bias, at_rope, mask, R: tl.constexpr):
    """Two halves of rows, float32, after bias and RoPE where these are given."""
    a = tl.load(x + at, mask, 0.0).to(tl.float32)
    b = tl.load(x + at + R, mask, 0.0).to(tl.float32)
    if bias is not None:
        a += tl.load(bias + at_bias, mask, 0.0).to(tl.float32)
        b += tl.load(bias + at_bias + R, mask, 0.0).to(tl.float32)
    if cos is not None:
        a, b = _rotated(a, b, cos, sin, at_rope, mask)
    return a, b


@triton.jit
def _stored(x, scale, dtype: tl.constexpr):
    """float32 as the cache holds it."""
    if scale is not None:
        x = tl.minimum(tl.maximum(x / scale, -FP8_MAX), FP8_MAX)
    return x.to(dtype)


@triton.jit
def _chunk_rows(
    x, bias, cos, sin, scale, b, head, count,
    T: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, ROPE_B: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """The chunk's rows of one KV head, [BLOCK_T, D / 2] twice, as the cache will hold them."""
    R: tl.constexpr = D // 2
    i = tl.arange(0, BLOCK_T)[:, None]
    r = tl.arange(0, R)[None, :]
    at = ((b * T + i) * KV + head) * D + r
    x1, x2 = _load_halves(
        x, bias, cos, sin, at, head * D + r, ((b % ROPE_B) * T + i) * R + r, i < count, R
    )
    return _stored(x1, scale, dtype), _stored(x2, scale, dtype)


@triton.jit
def _append(cache, x1, x2, row, count, D: tl.constexpr):
    """Write the chunk's rows at place ``row`` of the flattened cache."""
    i = tl.arange(0, BLOCK_T)[:, None]
    r = tl.arange(0, D // 2)[None, :]
    at = (row + i) * D + r
    tl.store(cache + at, x1, i < count)
    tl.store(cache + at + D // 2, x2, i < count)


@triton.jit
def _lengths(cache_len, chunk_len, b, T: tl.constexpr, S: tl.constexpr):
    """Length, valid rows of the chunk (0 where refused), and rows that get NaN."""
    length = tl.load(cache_len + b)
    count = tl.load(chunk_len + b)
    fits = (length >= 0) & (count >= 0) & (count <= T) & (length + count <= S)
    return tl.where(fits, length, 0), tl.where(fits, count, 0), tl.where(fits, 0, count)


@triton.jit
def prepare(
    q, k, v, k_cache, v_cache, cache_len, chunk_len,
    q_bias, k_bias, v_bias, cos, sin, k_scale, v_scale,
    q_out, k_cache_out, v_cache_out,
    T: tl.constexpr, KV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, S: tl.constexpr,
    ROPE_B: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """First of two launches: bias and RoPE on q, append of k and v. Grid: (B * KV, T + 1)."""
    b, head = (tl.program_id(0) // KV).to(tl.int64), tl.program_id(0) % KV
    t = tl.program_id(1)
    length, count, _ = _lengths(cache_len, chunk_len, b, T, S)
    R: tl.constexpr = D // 2
    if t < T:
        g = tl.arange(0, BLOCK_G)[:, None]
        r = tl.arange(0, R)[None, :]
        mask = (g < G) & (t < count)
        at = ((b * T + t) * KV * G + head * G + g) * D + r
        at_rope = ((b % ROPE_B) * T + t) * R + r + g * 0
        q1, q2 = _load_halves(q, q_bias, cos, sin, at, (head * G + g) * D + r, at_rope, mask, R)
        tl.store(q_out + at, q1.to(q_out.dtype.element_ty), mask)
        tl.store(q_out + at + R, q2.to(q_out.dtype.element_ty), mask)
    else:
        kv_type: tl.constexpr = k_cache.dtype.element_ty
        sk = tl.load(k_scale + head) if k_scale is not None else None
        sv = tl.load(v_scale + head) if v_scale is not None else None
        row = (b * KV + head) * S + length
        k1, k2 = _chunk_rows(k, k_bias, cos, sin, sk, b, head, count, T, KV, D, ROPE_B, kv_type)
        _append(k_cache_out, k1, k2, row, count, D)
        v1, v2 = _chunk_rows(v, v_bias, None, None, sv, b, head, count, T, KV, D, ROPE_B, kv_type)
        _append(v_cache_out, v1, v2, row, count, D)


@triton.jit
def attend(
    q, k, v, k_cache, v_cache, cache_len, chunk_len,
    q_bias, k_bias, v_bias, cos, sin, k_scale, v_scale,
    out, k_cache_out, v_cache_out, part_out, part_lse,
    T: tl.constexpr, KV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, S: tl.constexpr,
    ROPE_B: tl.constexpr, FUSED: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention of one tile of query rows over one piece of the cache.

    Grid: (B * KV, ceil(T * G / BLOCK_M), SPLITS). FUSED: piece 0 also appends the chunk and attends
    to it from registers, so no program reads a row that another one writes; otherwise ``prepare``
    ran before, and the chunk is part of the cache. With SPLITS > 1 each piece leaves its result and
    the logarithm of its weight for ``combine``.
    """
    b, head = (tl.program_id(0) // KV).to(tl.int64), tl.program_id(0) % KV
    split = tl.program_id(2)
    length, count, refused = _lengths(cache_len, chunk_len, b, T, S)
    held = length if FUSED else length + count  # places to read from the cache
    begin = split * SPLIT
    if (split > 0) & (begin >= held):
        return

    R: tl.constexpr = D // 2
    dtype: tl.constexpr = q.dtype.element_ty
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    t, g = m // G, m % G
    r = tl.arange(0, R)
    d = tl.arange(0, D)
    q_head = head * G + g
    q_at = ((b * T + t) * KV * G + q_head)[:, None] * D
    q1, q2 = _load_halves(
        q, q_bias, cos, sin, q_at + r[None, :], q_head[:, None] * D + r[None, :],
        ((b % ROPE_B) * T + t)[:, None] * R + r[None, :], (t < count)[:, None], R,
    )  # fmt: skip
    q1, q2 = q1.to(dtype), q2.to(dtype)

    sk = tl.load(k_scale + head) if k_scale is not None else None
    sv = tl.load(v_scale + head) if v_scale is not None else None
    # Scores are in units of log2, so that weights are powers of 2.
    unit = LOG2E / tl.sqrt(D * 1.0)
    if k_scale is not None:
        unit *= sk
    top = tl.full([BLOCK_M], LOW, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    row = (b * KV + head) * S

    if FUSED:
        if split == 0:
            kv_type: tl.constexpr = k_cache.dtype.element_ty
            i = tl.arange(0, BLOCK_T)
            k1, k2 = _chunk_rows(k, k_bias, cos, sin, sk, b, head, count, T, KV, D, ROPE_B, kv_type)
            at = ((b * T + i) * KV + head)[:, None] * D + d[None, :]
            v_new = tl.load(v + at, (i < count)[:, None], 0.0).to(tl.float32)
            if v_bias is not None:
                v_new += tl.load(v_bias + head * D + d)[None, :].to(tl.float32)
            v_new = _stored(v_new, sv, kv_type)
            if tl.program_id(1) == 0:
                _append(k_cache_out, k1, k2, row + length, count, D)
                v_at = (row + length + i)[:, None] * D + d[None, :]
                tl.store(v_cache_out + v_at, v_new, (i < count)[:, None])
            scores = tl.dot(q1, k1.to(dtype).T) + tl.dot(q2, k2.to(dtype).T)
            # Every row sees row 0; rows that count sees are those that it may see.
            scores = tl.where(i[None, :] <= t[:, None], scores * unit, LOW)
            top = tl.max(scores, 1)
            p = tl.exp2(scores - top[:, None])
            total = tl.sum(p, 1)
            acc = tl.dot(p.to(dtype), v_new.to(dtype), acc)

    n = tl.arange(0, BLOCK_N)
    end = tl.minimum(begin + SPLIT, held)
    for start in range(begin, end, BLOCK_N):
        place = start + n
        inside = (place < end)[:, None]
        k_at = (row + place)[:, None] * D + r[None, :]
        k1 = tl.load(k_cache + k_at, inside, 0.0).to(dtype)
        k2 = tl.load(k_cache + k_at + R, inside, 0.0).to(dtype)
        scores = tl.dot(q1, k1.T)
        scores = tl.dot(q2, k2.T, scores)
        if FUSED:
            seen = (place < end)[None, :]
        else:
            seen = (place[None, :] <= (length + t)[:, None]) & (place < end)[None, :]
        scores = tl.where(seen, scores * unit, LOW)
        new_top = tl.maximum(top, tl.max(scores, 1))
        fade = tl.exp2(top - new_top)
        p = tl.exp2(scores - new_top[:, None])
        total = total * fade + tl.sum(p, 1)
        v_at = (row + place)[:, None] * D + d[None, :]
        v_old = tl.load(v_cache + v_at, inside, 0.0).to(dtype)
        acc = tl.dot(p.to(dtype), v_old, acc * fade[:, None])
        top = new_top

    acc = acc / total[:, None]
    if v_scale is not None:
        acc *= sv
    if SPLITS == 1:
        acc = tl.where((t < count)[:, None], acc, 0.0)
        acc = tl.where((t < refused)[:, None], float("nan"), acc)
        tl.store(out + q_at + d[None, :], acc.to(dtype), (t < T)[:, None])
    else:
        at = ((b * KV + head) * SPLITS + split) * T * G + m
        tl.store(part_out + at[:, None] * D + d[None, :], acc, (t < count)[:, None])
        tl.store(part_lse + at, top + tl.log2(total), t < count)


@triton.jit
def combine(
    part_out, part_lse, cache_len, chunk_len, out,
    T: tl.constexpr, KV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, S: tl.constexpr,
    FUSED: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Weighted mean of the pieces that ``attend`` left. Grid: (B * KV, T)."""
    b, head = (tl.program_id(0) // KV).to(tl.int64), tl.program_id(0) % KV
    t = tl.program_id(1)
    length, count, refused = _lengths(cache_len, chunk_len, b, T, S)
    held = length if FUSED else length + count
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, D)[None, :]
    valid = (g < G) & (t < count)
    top = tl.full([BLOCK_G], LOW, tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, D], tl.float32)
    for split in range(0, tl.maximum(tl.cdiv(held, SPLIT), 1)):
        at = (((b * KV + head) * SPLITS + split) * T + t) * G + g
        lse = tl.load(part_lse + at, valid, LOW)
        part = tl.load(part_out + at[:, None] * D + d, valid[:, None], 0.0)
        new_top = tl.maximum(top, lse)
        fade = tl.exp2(top - new_top)
        weight = tl.exp2(lse - new_top)
        total = total * fade + weight
        acc = acc * fade[:, None] + part * weight[:, None]
        top = new_top
    acc = tl.where(valid[:, None], acc / total[:, None], 0.0)
    acc = tl.where((t < refused) & (g < G)[:, None], float("nan"), acc)
    at = ((b * T + t) * KV * G + head * G + g)[:, None] * D + d
    tl.store(out + at, acc.to(out.dtype.element_ty), (g < G)[:, None])
