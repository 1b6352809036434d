"""The building blocks against plain formulas in float64, and their traps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import erf

from ai_jax.kernels.xla import rotate
from ai_jax.model import layers

F32 = {"dtype": jnp.float32, "param_dtype": jnp.float32}


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_gelu_is_the_exact_one():
    x = np.linspace(-6, 6, 1001, dtype=np.float32)
    exact = 0.5 * x * (1 + erf(np.float64(x) / np.sqrt(2)))
    assert np.abs(layers.gelu(jnp.asarray(x)) - exact).max() <= 1e-6
    assert np.abs(jax.nn.gelu(x) - exact).max() > 1e-4  # jax's default is the tanh one


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("t", [1, 2, 7, 40])
def test_conv_pads_one_zero_on_both_sides(stride, t):
    conv = layers.Conv1d(5, 6, stride=stride, rngs=nnx.Rngs(0), **F32)
    conv.bias[...] = normal(1, 6)
    x = normal(2, 2, t, 5)
    padded = np.pad(x, ((0, 0), (1, 1), (0, 0)))
    windows = np.stack([padded[:, i : i + 3] for i in range(0, t, stride)], axis=1)
    expected = np.einsum("btkc,ock->bto", windows, conv.weight[...]) + conv.bias[...]
    np.testing.assert_allclose(conv(x), expected, atol=1e-6)


def test_layer_norm_has_eps_1e_5():
    norm = layers.LayerNorm(8, **F32)
    x = np.float64(normal(0, 3, 8)) * 1e-3
    centred = x - x.mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(norm(x.astype(np.float32)), expected, atol=1e-6)


def test_rms_norm_casts_before_it_multiplies():
    norm = layers.RMSNorm(64, 1e-6, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    norm.weight[...] = jnp.asarray(normal(0, 64), jnp.bfloat16)
    x = jnp.asarray(normal(1, 5, 64), jnp.bfloat16)
    x32 = x.astype(jnp.float32)
    unit = x32 / jnp.sqrt((x32**2).mean(-1, keepdims=True) + 1e-6)
    assert (norm(x) == unit.astype(jnp.bfloat16) * norm.weight[...]).all()


def test_dot_has_the_gradient_of_a_product():
    x, w, g = normal(0, 2, 3, 4), normal(1, 5, 4), normal(2, 2, 3, 5)
    y, back = jax.vjp(layers.dot, x, w)
    plain, plain_back = jax.vjp(lambda x, w: x @ w.T, x, w)
    np.testing.assert_allclose(y, plain, atol=1e-6)
    for ours, theirs in zip(back(g), plain_back(g), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_dot_in_bfloat16_sums_in_float32_and_keeps_the_masters_gradient_in_float32():
    x = jnp.asarray(normal(0, 7, 512), jnp.bfloat16)
    w = jnp.asarray(normal(1, 3, 512))
    y, back = jax.vjp(layers.dot, x, w)
    exact = np.float64(x) @ np.float64(w.astype(jnp.bfloat16)).T
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-4)
    dx, dw = back(jnp.ones_like(y))
    assert (dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(dw, np.tile(np.float64(x).sum(0), (3, 1)), rtol=1e-5, atol=1e-4)


def test_dot_of_one_bfloat16_row_is_a_row_of_the_product():
    x, w = jnp.asarray(normal(0, 4, 32), jnp.bfloat16), jnp.asarray(normal(1, 8, 32), jnp.bfloat16)
    np.testing.assert_allclose(layers.dot(x[:1], w), layers.dot(x, w)[:1], rtol=1e-6, atol=1e-6)
    assert layers.dot(x[0], w).shape == (8,)


def plain_attention(q_bthd, k_bksd, v_bksd, mask_ts):
    b, t, h, d = q_bthd.shape
    group = h // k_bksd.shape[1]
    out = np.zeros((b, t, h, d))
    for head in range(h):
        q = np.float64(q_bthd[:, :, head])
        k, v = np.float64(k_bksd[:, head // group]), np.float64(v_bksd[:, head // group])
        score = np.where(mask_ts, q @ k.swapaxes(1, 2) / np.sqrt(d), -np.inf)
        weight = np.exp(score - score.max(-1, keepdims=True))
        out[:, :, head] = weight / weight.sum(-1, keepdims=True) @ v
    return out.reshape(b, t, h * d)


def test_attention_groups_queries():
    q, k, v = normal(0, 2, 3, 4, 8), normal(1, 2, 2, 5, 8), normal(2, 2, 2, 5, 8)
    mask = np.array([[1, 0, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]], bool)
    out = layers.attention(q, k, v, jnp.asarray(mask)[None])
    np.testing.assert_allclose(out, plain_attention(q, k, v, mask), atol=1e-6)


@pytest.mark.parametrize("t", [1, 5, 127, 128, 129, 300])
def test_causal_attention_is_attention_with_a_causal_mask(t):
    q, k, v = normal(0, 1, t, 4, 8), normal(1, 1, 2, t, 8), normal(2, 1, 2, t, 8)
    expected = plain_attention(q, k, v, np.tril(np.ones((t, t), bool)))
    np.testing.assert_allclose(layers.causal_attention(q, k, v), expected, atol=1e-6)


@jax.jit
def rope_score(q, k, m, n):
    """<R_m q, R_n k>."""
    angle = layers.rope_angles(jnp.stack([m, n]), 16, 1e6)
    q, k = rotate(jnp.stack([q, k]), jnp.cos(angle), jnp.sin(angle))
    return q @ k


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 30_000), st.integers(0, 30_000), st.integers(0, 2_000))
def test_rope_knows_only_distances(m, n, shift):
    """Up to the rounding of float32 angles: 2e-3 radians at 30,000."""
    q, k = normal(0, 16), normal(1, 16)
    here, there = rope_score(q, k, m, n), rope_score(q, k, m + shift, n + shift)
    assert float(here) == pytest.approx(float(there), abs=2e-2)


def test_rope_angles_are_float32_where_activations_are_not():
    """Angles of bfloat16 positions or frequencies are off by more than half a radian at 600."""
    exact = 600 / 1e6 ** (np.arange(0, 128, 2) / 128)
    assert np.abs(layers.rope_angles(jnp.asarray(600), 128, 1e6) - exact).max() <= 1e-4


def test_rotate_turns_halves_not_neighbours():
    x = jnp.arange(4.0)
    turned = rotate(x, jnp.zeros(2), jnp.ones(2))  # by 90 degrees
    assert turned.tolist() == [-2.0, -3.0, 0.0, 1.0]
