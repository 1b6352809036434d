"""The dual loss: which control token at each decision, which text in each reply.

``L = (1/N) * sum(-log P(t_j) + lambda * -log P(s_j))`` over the N supervised positions j of the
global batch. Every function returns sums over its own rows and leaves the division to the caller,
so that devices and accumulation steps add up to exactly the loss of one large batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

MASK = -1

Sums = dict[str, jax.Array]


def shift(target_bt: jax.Array) -> jax.Array:
    """Align targets with the position that predicts them: y[j + 1] moves to j."""
    return jnp.pad(target_bt[:, 1:], ((0, 0), (0, 1)), constant_values=MASK)


def count_targets(stream_bt: jax.Array, lm_bt: jax.Array) -> jax.Array:
    """N: supervised positions of a batch, float32 (the first one of a row has no predictor)."""
    return jnp.sum((stream_bt[..., 1:] >= 0) | (lm_bt[..., 1:] >= 0), dtype=jnp.float32)


def dual_loss(
    logits_btv: jax.Array,
    stream_bt: jax.Array,
    lm_bt: jax.Array,
    *,
    silent: int,
    response: int,
    lambda_stream: float = 1.0,
    response_weight: float = 1.0,
) -> tuple[jax.Array, Sums]:
    """Numerator of the dual loss, and the sums that metrics are made of.

    logits_btv: float32, position j predicts token j + 1. stream_bt, lm_bt: int32 targets aligned
    with the tokens (y[j] supervises token j), exclusive, -1 where masked. The softmax of both terms
    runs over the whole vocabulary, as in the paper: a decision also learns that text is illegal
    there. Metrics of decisions compare the two control tokens alone, since serving masks all
    others. response_weight multiplies the term of positions whose target is ``response``; N stays.
    """
    stream_bt, lm_bt = shift(stream_bt), shift(lm_bt)
    is_stream_bt, is_lm_bt = stream_bt >= 0, lm_bt >= 0
    target_bt = jnp.where(is_stream_bt, stream_bt, lm_bt)
    picked_bt = jnp.take_along_axis(logits_btv, jnp.maximum(target_bt, 0)[..., None], -1)[..., 0]
    nll_bt = jax.nn.logsumexp(logits_btv, axis=-1) - picked_bt

    wants_bt = stream_bt == response
    stream_nll_bt = jnp.where(is_stream_bt, nll_bt, 0.0)
    lm_nll = jnp.sum(jnp.where(is_lm_bt, nll_bt, 0.0))
    weighted = jnp.sum(stream_nll_bt * jnp.where(wants_bt, response_weight, 1.0))
    loss = lm_nll + lambda_stream * weighted

    answers_bt = is_stream_bt & (logits_btv[..., response] > logits_btv[..., silent])
    text_right_bt = is_lm_bt & (jnp.argmax(logits_btv, axis=-1) == lm_bt)
    sums = {
        "lm_nll": lm_nll,
        "lm_n": _count(is_lm_bt),
        "lm_right": _count(text_right_bt),
        "stream_nll": jnp.sum(stream_nll_bt),
        "stream_n": _count(is_stream_bt),
        "true_positives": _count(answers_bt & wants_bt),
        "false_positives": _count(answers_bt & ~wants_bt),
        "false_negatives": _count(is_stream_bt & wants_bt & ~answers_bt),
    }
    return loss, sums


def event_loss(
    hidden_btd: jax.Array,
    stream_bt: jax.Array,
    event_bcl: jax.Array,
    weight_ld: jax.Array,
    bias_l: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Numerator and count of the auxiliary loss: which labels sound in each chunk.

    A linear head reads the decoder where it decides (the last position of each chunk). Numerator:
    -log P of the chunk's label set, independent Bernoullis, summed over labels and chunks; count:
    the chunks that have a decision. hidden_btd float32, event_bcl float32 0/1.
    """
    decides_bt = shift(stream_bt) >= 0
    chunk_bt = jnp.cumsum(decides_bt, axis=1) - 1  # at the i-th decision of a row: i
    wanted_btl = jnp.take_along_axis(event_bcl, jnp.maximum(chunk_bt, 0)[..., None], axis=1)
    logits_btl = hidden_btd @ weight_ld.T + bias_l
    bce_btl = jax.nn.softplus(logits_btl) - wanted_btl * logits_btl
    return jnp.sum(jnp.where(decides_bt[..., None], bce_btl, 0.0)), _count(decides_bt)


def _count(mask: jax.Array) -> jax.Array:
    return jnp.sum(mask, dtype=jnp.float32)
