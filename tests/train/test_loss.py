"""The dual loss against its definition in float64, and the sums that metrics are made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ai_jax.train.loss import count_targets, dual_loss, event_loss
from ai_jax.train.metrics import summarize

VOCAB, SILENT, RESPONSE = 11, 9, 10


def random_case(seed, rows=3, length=17):
    """Logits and exclusive targets as in Algorithm 2: a few decisions, replies, masks."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, length, VOCAB)).astype(np.float32) * 3
    kind = rng.choice(3, size=(rows, length), p=(0.4, 0.3, 0.3))
    stream = np.where(kind == 1, rng.choice([SILENT, RESPONSE], size=kind.shape), -1)
    lm = np.where(kind == 2, rng.integers(0, SILENT, size=kind.shape), -1)
    return logits, stream.astype(np.int32), lm.astype(np.int32)


def reference(logits, stream, lm, lam, response_weight=1.0):
    """Position by position, in float64."""
    total, sums = 0.0, dict.fromkeys(("lm", "stream", "n_lm", "n_stream", "tp", "fp", "fn"), 0.0)
    sums["right"] = 0.0
    for row in range(logits.shape[0]):
        for j in range(1, logits.shape[1]):
            z = logits[row, j - 1].astype(np.float64)
            log_p = z - np.log(np.sum(np.exp(z - z.max()))) - z.max()
            if stream[row, j] >= 0:
                wanted, said = stream[row, j] == RESPONSE, z[RESPONSE] > z[SILENT]
                weight = response_weight if wanted else 1.0
                total -= lam * weight * log_p[stream[row, j]]
                sums["stream"] -= log_p[stream[row, j]]
                sums["n_stream"] += 1
                sums["tp"] += wanted and said
                sums["fp"] += said and not wanted
                sums["fn"] += wanted and not said
            if lm[row, j] >= 0:
                total -= log_p[lm[row, j]]
                sums["lm"] -= log_p[lm[row, j]]
                sums["n_lm"] += 1
                sums["right"] += np.argmax(z) == lm[row, j]
    return total, sums


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("lam, weight", [(1.0, 1.0), (0.5, 1.0), (2.0, 3.0)])
def test_equals_the_definition(seed, lam, weight):
    logits, stream, lm = random_case(seed)
    want, want_sums = reference(logits, stream, lm, lam, weight)
    got, sums = dual_loss(
        logits,
        stream,
        lm,
        silent=SILENT,
        response=RESPONSE,
        lambda_stream=lam,
        response_weight=weight,
    )
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert count_targets(stream, lm) == want_sums["n_lm"] + want_sums["n_stream"]
    names = {
        "lm_nll": "lm",
        "stream_nll": "stream",
        "lm_n": "n_lm",
        "stream_n": "n_stream",
        "lm_right": "right",
        "true_positives": "tp",
        "false_positives": "fp",
        "false_negatives": "fn",
    }
    for ours, theirs in names.items():
        np.testing.assert_allclose(sums[ours], want_sums[theirs], rtol=1e-5, err_msg=ours)
    assert set(sums) == set(names)


def test_gradient_equals_softmax_minus_target():
    logits, stream, lm = random_case(7)
    grad = jax.grad(
        lambda z: dual_loss(z, stream, lm, silent=SILENT, response=RESPONSE, lambda_stream=0.7)[0]
    )(logits)
    z = logits.astype(np.float64)
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    want = np.zeros_like(p)
    for target, weight in ((stream, 0.7), (lm, 1.0)):
        for row, j in zip(*np.nonzero(target[:, 1:] >= 0), strict=True):
            want[row, j] = weight * (p[row, j] - np.eye(VOCAB)[target[row, j + 1]])
    np.testing.assert_allclose(grad, want, atol=1e-6)


def test_sums_of_parts_are_the_sums_of_the_whole():
    logits, stream, lm = random_case(1, rows=6)
    keys = {"silent": SILENT, "response": RESPONSE}
    whole = dual_loss(logits, stream, lm, **keys)
    parts = [
        dual_loss(logits[i : i + 2], stream[i : i + 2], lm[i : i + 2], **keys) for i in (0, 2, 4)
    ]
    summed = jax.tree.map(lambda *x: sum(x), *parts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), whole, summed)


def test_masked_positions_do_not_matter():
    logits, stream, lm = random_case(2)
    predicts = np.pad((stream >= 0) | (lm >= 0), ((0, 0), (0, 1)))[:, 1:]
    other = np.where(predicts[..., None], logits, 100 * np.ones_like(logits))
    keys = {"silent": SILENT, "response": RESPONSE}
    a, b = dual_loss(logits, stream, lm, **keys), dual_loss(other, stream, lm, **keys)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_huge_logits_stay_finite():
    logits, stream, lm = random_case(3)
    loss, _ = dual_loss(logits * 1e4, stream, lm, silent=SILENT, response=RESPONSE)
    assert np.isfinite(loss)


def test_event_loss_reads_each_chunk_where_it_is_decided():
    rng = np.random.default_rng(0)
    b, t, chunks, labels, width = 2, 20, 3, 4, 5
    # The second row has fewer decisions than chunks; its last chunk must not count.
    decided = [[4, 9, 15], [2, 18]]
    stream = np.full((b, t), -1, np.int32)
    for row, positions in enumerate(decided):
        stream[row, positions] = SILENT
    hidden = rng.normal(size=(b, t, width)).astype(np.float32)
    target = rng.integers(0, 2, size=(b, chunks, labels)).astype(np.float32)
    weight = rng.normal(size=(labels, width)).astype(np.float32)
    bias = rng.normal(size=labels).astype(np.float32)
    want = 0.0
    for row, positions in enumerate(decided):
        for chunk, j in enumerate(positions):
            p = 1 / (1 + np.exp(-(weight @ hidden[row, j - 1].astype(np.float64) + bias)))
            y = target[row, chunk]
            want -= np.sum(y * np.log(p) + (1 - y) * np.log(1 - p))
    got, count = event_loss(jnp.asarray(hidden), stream, target, weight, bias)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert count == 5


def test_summary_of_a_perfect_and_an_empty_batch():
    zero = dict.fromkeys(
        ("lm_nll", "lm_n", "lm_right", "stream_nll", "stream_n"), 0.0
    ) | dict.fromkeys(("true_positives", "false_positives", "false_negatives"), 0.0)
    empty = summarize(zero)
    assert all(np.isnan(v) for v in empty.values())
    some = summarize(
        zero | {"stream_n": 10, "true_positives": 3, "false_positives": 1, "false_negatives": 2}
    )
    assert some["trigger_accuracy"] == pytest.approx(0.7)
    assert some["response_precision"] == pytest.approx(3 / 4)
    assert some["response_recall"] == pytest.approx(3 / 5)
