"""Positions rounded to float16, as the authors' code has them: everywhere, and only when asked."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ai_jax.config import TextConfig
from ai_jax.errors import UserError
from ai_jax.model.cache import init_cache, slide
from ai_jax.model.decoder import Decoder
from ai_jax.model.layers import rope_positions

LENGTH = 2200


def decoder_of(text: TextConfig) -> Decoder:
    """The same random weights whatever the positions; queries large enough for them to matter."""
    decoder = Decoder(text, rngs=nnx.Rngs(0))
    for layer in decoder.layers:
        for proj in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            proj.weight[...] *= 20
    return decoder


@pytest.fixture(scope="module")
def texts(tiny):
    """One layer with plain positions, and with rounded ones."""
    plain = dataclasses.replace(tiny.text, num_hidden_layers=1)
    return plain, dataclasses.replace(plain, fp16_positions=True)


@pytest.fixture(scope="module")
def stream(tiny):
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=(1, LENGTH, tiny.text.hidden_size)), jnp.float32)


@nnx.jit
def full(decoder, x_btd):
    return decoder(x_btd)


@nnx.jit
def extend(decoder, x_btd, cache):
    return decoder.extend(x_btd, cache, jnp.full(x_btd.shape[0], x_btd.shape[1]))


def read(decoder, x_btd, cache, sizes):
    out, start = [], 0
    for size in sizes:
        y, cache = extend(decoder, x_btd[:, start : start + size], cache)
        out.append(y)
        start += size
    return jnp.concatenate(out, axis=1), cache


def test_positions_are_rounded_as_torch_rounds_them():
    places = jnp.arange(32_768)
    rounded = jax.jit(rope_positions, static_argnums=1)(places, True)
    assert rounded[2047:2054].tolist() == [2047, 2048, 2048, 2050, 2052, 2052, 2052]
    np.testing.assert_array_equal(rounded, np.arange(32_768).astype(np.float16).astype(np.float32))
    assert rope_positions(places, False) is places


@pytest.mark.torch
def test_positions_are_those_of_a_float16_range_in_torch():
    torch = pytest.importorskip("torch")
    theirs = torch.arange(32_768, dtype=torch.float16).float().numpy()
    np.testing.assert_array_equal(rope_positions(jnp.arange(32_768), True), theirs)


def test_only_places_above_2048_change(texts, stream):
    plain, rounded = (full(decoder_of(text), stream)[0] for text in texts)
    np.testing.assert_array_equal(plain[:2049], rounded[:2049])
    assert np.abs(plain[2049:] - rounded[2049:]).max() > 1e-2


def test_reading_piece_by_piece_equals_one_pass(texts, stream):
    decoder = decoder_of(texts[1])
    cache = init_cache(texts[1], 1, LENGTH)
    got, _ = read(decoder, stream, cache, [2040, *[13] * 12, 4])
    np.testing.assert_allclose(got, full(decoder, stream), atol=1e-5)


@pytest.mark.parametrize("drop", [1, 7, 149])
def test_a_slide_turns_keys_to_their_new_rounded_positions(texts, stream, drop):
    """Keys of the only layer depend on the token and its position alone."""
    text, prefix = texts[1], 2  # an odd drop moves even places to odd ones
    decoder = decoder_of(text)
    _, cache = read(decoder, stream, init_cache(text, 1, LENGTH), [LENGTH])
    slid = jax.jit(slide, static_argnums=0)(text, cache, jnp.array([prefix]), jnp.array([drop]))
    kept = jnp.concatenate([stream[:, :prefix], stream[:, prefix + drop :]], axis=1)
    _, fresh = read(decoder, kept, init_cache(text, 1, LENGTH), [LENGTH - drop])
    n = LENGTH - drop
    scale = float(jnp.abs(fresh.k[0]).max())
    # One rounding of a float32 angle at 2,200 is 1.2e-4.
    np.testing.assert_allclose(slid.k[0][:, :, :n], fresh.k[0][:, :, :n], atol=5e-4 * scale)
    np.testing.assert_allclose(slid.v[0][:, :, :n], fresh.v[0][:, :, :n], atol=1e-5)


def test_positions_must_fit_float16(texts):
    with pytest.raises(UserError, match=r"must not exceed 65504 \(got 65505\)"):
        dataclasses.replace(texts[1], max_position_embeddings=65_505)
    assert texts[0] == dataclasses.replace(texts[1], fp16_positions=False)
