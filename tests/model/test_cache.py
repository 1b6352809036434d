"""KV cache: writes in place, slides to any place with one program, never overflows unnoticed."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ai_jax.errors import UserError
from ai_jax.kernels.xla import rotate
from ai_jax.model import omni
from ai_jax.model.cache import init_cache, slide
from ai_jax.model.layers import rope_angles

MAX_LEN = 64


@pytest.fixture(scope="module")
def split(tiny):
    return nnx.split(omni.build(tiny, omni.init_params(tiny, 0)))


extend = jax.jit(omni.extend, static_argnums=0, donate_argnums=2)
slide_jit = jax.jit(slide, static_argnums=0)


def filled(tiny, split, lengths):
    """A cache of as many rows as ``lengths``, with that many random tokens in each."""
    tokens = np.random.default_rng(0).integers(0, 256, (len(lengths), max(lengths)))
    cache = init_cache(tiny.text, len(lengths), MAX_LEN)
    return extend(*split, cache, tokens, None, jnp.asarray(lengths))[1]


def test_cache_must_fit_the_trained_positions(tiny):
    text = dataclasses.replace(tiny.text, max_position_embeddings=32)
    for length in (0, 33):
        with pytest.raises(UserError, match="max_position_embeddings = 32"):
            init_cache(text, 1, length)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_extend_updates_the_cache_in_place(tiny, dtype):
    """The compiled program aliases every buffer, and neither copies nor converts one."""
    rows, text = 3, dataclasses.replace(tiny.text, num_hidden_layers=1)
    config = dataclasses.replace(tiny, text=text)
    graphdef, state = nnx.split(omni.build(config, omni.init_params(config, 0, dtype), dtype))
    cache = init_cache(text, rows, 8192, dtype)
    tokens, audio = jnp.zeros((rows, 11), int), jnp.zeros((rows, 10, text.hidden_size), dtype)
    program = extend.lower(graphdef, state, cache, tokens, audio, jnp.ones(rows, int)).compile()
    buffers = cache.k + cache.v
    assert program.memory_analysis().alias_size_in_bytes >= sum(x.nbytes for x in buffers)
    shape = ",".join(map(str, buffers[0].shape))
    entry = program.as_text().partition("\nENTRY ")[2]
    made = re.findall(rf"= \w+\[{shape}\]\S* (\S+)\((.*)", entry)
    assert made and {op for op, _ in made} <= {"parameter", "fusion", "scatter"}
    fused = [operands for op, operands in made if op == "fusion"]
    assert all("scatter" in operands for operands in fused)


def test_overflow_is_nan_and_spares_the_other_rows(tiny, split):
    cache = filled(tiny, split, [MAX_LEN - 2, 5])
    before = cache.v[0][0] + 0
    logits, cache = extend(*split, cache, jnp.ones((2, 3), int), None, jnp.array([3, 3]))
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()
    np.testing.assert_array_equal(cache.v[0][0][:, : MAX_LEN - 2], before[:, : MAX_LEN - 2])


PREFIX, DROP, LENGTH = np.array([4, 0, 7]), np.array([11, 5, 0]), np.array([50, 64, 20])


def kept(row):
    """Places of the tokens that a row keeps."""
    return np.r_[: PREFIX[row], PREFIX[row] + DROP[row] : LENGTH[row]]


def test_slide_moves_values_untouched_and_turns_keys(tiny, split):
    old = filled(tiny, split, LENGTH.tolist())
    new = slide_jit(tiny.text, old, PREFIX, DROP)
    assert new.length_b.tolist() == (LENGTH - DROP).tolist()
    for row in range(3):
        places = kept(row)
        shift = jnp.arange(len(places)) - places
        angle = rope_angles(shift, tiny.text.head_dim, tiny.text.rope_theta)
        for layer in range(tiny.text.num_hidden_layers):
            k, v = (x[layer][row][:, : len(places)] for x in (new.k, new.v))
            np.testing.assert_array_equal(v, old.v[layer][row][:, places])
            turned = rotate(old.k[layer][row][:, places], jnp.cos(angle), jnp.sin(angle))
            np.testing.assert_allclose(k, turned, atol=1e-6)


def test_slide_equals_keys_computed_at_their_new_positions(tiny, split):
    """Keys and values of layer 0 depend on the token and its position alone."""
    tokens = np.random.default_rng(1).integers(0, 256, (3, MAX_LEN))
    cache = init_cache(tiny.text, 3, MAX_LEN)
    _, cache = extend(*split, cache, tokens, None, jnp.asarray(LENGTH))
    cache = slide_jit(tiny.text, cache, PREFIX, DROP)
    short = np.zeros_like(tokens)
    for row in range(3):
        short[row, : LENGTH[row] - DROP[row]] = tokens[row, kept(row)]
    fresh = init_cache(tiny.text, 3, MAX_LEN)
    _, fresh = extend(*split, fresh, short, None, jnp.asarray(LENGTH - DROP))
    for row, n in enumerate(LENGTH - DROP):
        for ours, theirs in ((cache.k, fresh.k), (cache.v, fresh.v)):
            np.testing.assert_allclose(ours[0][row][:, :n], theirs[0][row][:, :n], atol=1e-5)


def test_slide_compiles_once_and_repeats_without_drift(tiny, split):
    cache = filled(tiny, split, [MAX_LEN])
    key = cache.k[0][0, :, MAX_LEN - 1] + 0
    compiled = slide_jit._cache_size()
    for prefix, drop in ((3, 7), (3, 20), (0, 1), (10, 12)):
        cache = slide_jit(tiny.text, cache, jnp.array([prefix]), jnp.array([drop]))
    assert slide_jit._cache_size() == compiled + 1
    assert cache.length_b.tolist() == [MAX_LEN - 40]
    angle = rope_angles(jnp.array(-40), tiny.text.head_dim, tiny.text.rope_theta)
    turned = rotate(key, jnp.cos(angle), jnp.sin(angle))
    np.testing.assert_allclose(cache.k[0][0, :, MAX_LEN - 41], turned, atol=1e-5)


def test_a_stream_goes_on_after_a_slide(tiny, split):
    """Extending a slid cache works at the new positions: equal to a cache without the past."""
    cache = filled(tiny, split, [MAX_LEN])
    slid = slide_jit(tiny.text, cache, jnp.array([0]), jnp.array([MAX_LEN]))
    fresh = init_cache(tiny.text, 1, MAX_LEN)
    tokens, lengths = jnp.arange(6)[None], jnp.array([6])
    ours, slid = extend(*split, slid, tokens, None, lengths)
    theirs, _ = extend(*split, fresh, tokens, None, lengths)
    np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert slid.length_b.tolist() == [6]
