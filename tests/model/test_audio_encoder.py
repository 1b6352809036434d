"""Audio encoder: chunks alone, padding without influence, counts of tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ai_jax.config import AudioConfig
from ai_jax.errors import UserError
from ai_jax.model.audio_encoder import AudioEncoder, audio_tokens


def make(audio, dtype=jnp.float32):
    """A compiled encoder with random weights: ``run(mel, frames=None)``."""
    graphdef, state = nnx.split(AudioEncoder(audio, rngs=nnx.Rngs(0), dtype=dtype))
    return jax.jit(lambda mel, frames=None: nnx.merge(graphdef, state)(mel, frames))


@pytest.fixture(scope="module")
def encode(tiny):
    return make(tiny.audio)


def mel(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_counts_of_tokens():
    assert [audio_tokens(f) for f in (0, 1, 2, 3, 4, 6, 7, 39, 40, 200)] == [
        0, 0, 0, 1, 1, 1, 2, 10, 10, 50,
    ]  # fmt: skip


@pytest.mark.parametrize("seconds", [0.2, 0.4, 0.6, 0.8])
def test_chunk_sizes(tiny, seconds):
    audio = dataclasses.replace(tiny.audio, n_window=int(seconds * 50))
    out = jax.eval_shape(make(audio), mel(0, 2, audio.chunk_frames, 80))
    assert out.shape == (2, audio.chunk_tokens, audio.output_dim)
    assert audio.chunk_tokens == audio_tokens(audio.chunk_frames) == 25 * seconds


def test_odd_windows_are_refused(tiny):
    with pytest.raises(UserError, match="n_window must be even"):
        AudioConfig(**{**dataclasses.asdict(tiny.audio), "n_window": 21})


def test_full_chunks_need_no_lengths(encode):
    x = mel(0, 3, 40, 80)
    np.testing.assert_allclose(encode(x), encode(x, jnp.full(3, 40)), atol=1e-6)


def test_a_row_depends_on_its_valid_frames_only(encode):
    x, frames = mel(0, 4, 40, 80), np.array([40, 23, 2, 0])
    expected = encode(x, frames)
    x = x.copy()
    x[1, 23:], x[2, 2:], x[3] = np.nan, 1e9, np.inf
    np.testing.assert_array_equal(encode(x, frames), expected)
    assert np.isfinite(expected).all()
    for row, count in enumerate(audio_tokens(frames)):
        assert (np.abs(expected[row]).sum(-1) > 0).sum() == count


def test_batch_equals_singles(encode):
    x, frames = mel(0, 4, 40, 80), np.array([40, 40, 23, 7])
    together = encode(x, frames)
    for row in range(4):
        alone = encode(x[row : row + 1], frames[row : row + 1])
        np.testing.assert_allclose(together[row], alone[0], atol=1e-6)


def test_bfloat16_stays_close(tiny):
    """Tolerance: 3 % of the largest value, a few bfloat16 roundings (0.4 % each) deep."""
    x = mel(0, 2, 40, 80)
    exact, rough = make(tiny.audio)(x), make(tiny.audio, jnp.bfloat16)(x)
    assert rough.dtype == jnp.bfloat16
    assert np.abs(rough.astype(jnp.float32) - exact).max() <= 0.03 * np.abs(exact).max()


def test_frozen_layers_get_no_gradient(tiny):
    encoder = AudioEncoder(tiny.audio, rngs=nnx.Rngs(0), stacked=True)
    graphdef, state = nnx.split(encoder)
    layers = jax.tree.map(lambda w: jnp.stack([w, w]), state["layers"])

    def loss(conv, layers, frozen_layers):
        merged = nnx.merge(graphdef, nnx.State({**state, "conv2": conv, "layers": layers}))
        return merged(mel(0, 2, 40, 80), frozen_layers=frozen_layers).sum()

    grad = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    free = grad(state["conv2"], layers, 0)
    conv, half = grad(state["conv2"], layers, 1)
    assert all((g == 0).all() for g in jax.tree.leaves(conv))
    for all_, upper in zip(jax.tree.leaves(free[1]), jax.tree.leaves(half), strict=True):
        assert (upper[0] == 0).all()
        np.testing.assert_allclose(upper[1], all_[1], rtol=1e-5, atol=1e-5)
        assert np.abs(all_[0]).max() > 0
