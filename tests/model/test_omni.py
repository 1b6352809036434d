"""The whole model: weights in and out, and the training pass equal to serving."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ai_jax.config import ModelConfig, preset
from ai_jax.errors import UserError
from ai_jax.model import omni
from ai_jax.model.cache import init_cache

CHUNKS = 3
encode = jax.jit(omni.encode, static_argnums=0)
extend = jax.jit(omni.extend, static_argnums=0, donate_argnums=2)


@pytest.fixture(scope="module")
def params(tiny):
    """Random weights large enough for nothing to drown; biases too."""
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(w + rng.standard_normal(w.shape) * max(w.shape) ** -0.5, w.dtype)
        for name, w in omni.init_params(tiny, 0).items()
    }


@pytest.fixture(scope="module")
def stream(tiny):
    """tokens [2, t] of a prefix, three chunks, a reply and padding; mel [2, 3, 40, 80]."""
    fmt = tiny.stream.format
    rows = []
    for prefix in ([1, 2, 3], []):
        row = list(prefix)
        for chunk in range(CHUNKS):
            row += [fmt.audio] * 10
            row += [fmt.response, 65, 66, fmt.eos] if chunk == 1 else [fmt.silent]
        rows.append(row)
    width = max(map(len, rows))
    tokens = np.array([row + [fmt.pad] * (width - len(row)) for row in rows])
    mel = np.random.default_rng(1).standard_normal((2, CHUNKS, 40, 80)).astype(np.float32)
    return tokens, mel


def test_parameters_are_named_as_in_the_checkpoint():
    """All 924 tensors of the 3B thinker but the 518 of vision, with their shapes."""
    config = preset("model", "qwen2_5_omni_3b", ModelConfig)
    shapes = {name: x.shape for name, x in omni.abstract_params(config).items()}
    assert len(shapes) == 1442 - 518
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (151936, 2048)
    assert shapes["model.layers.35.self_attn.k_proj.bias"] == (256,)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (2048, 11008)
    assert shapes["audio_tower.conv1.weight"] == (1280, 128, 3)
    assert shapes["audio_tower.audio_bos_eos_token.weight"] == (2, 2048)
    assert "audio_tower.layers.0.self_attn.k_proj.bias" not in shapes
    assert shapes["audio_tower.layers.31.self_attn.out_proj.bias"] == (1280,)


def test_tied_embeddings_have_no_head(tiny):
    tied = dataclasses.replace(tiny, text=dataclasses.replace(tiny.text, tie_word_embeddings=True))
    params = omni.init_params(tied, 0)
    assert "lm_head.weight" not in params
    hidden = jnp.ones((1, 1, tied.text.hidden_size))
    expected = hidden @ params["model.embed_tokens.weight"].T
    np.testing.assert_allclose(omni.unembed(tied, params, hidden), expected, atol=1e-6)
    np.testing.assert_allclose(omni.build(tied, params).logits(hidden), expected, atol=1e-6)


def test_init_is_reproducible_and_of_the_right_type(tiny):
    a, b, c = (omni.init_params(tiny, seed, jnp.bfloat16) for seed in (1, 1, 2))
    assert all((a[name] == b[name]).all() for name in a)
    assert (a["lm_head.weight"] != c["lm_head.weight"]).any()
    assert {w.dtype for w in a.values()} == {jnp.dtype(jnp.bfloat16)}
    assert omni.abstract_params(tiny, jnp.bfloat16) == {
        name: jax.ShapeDtypeStruct(w.shape, w.dtype) for name, w in a.items()
    }


def test_build_and_get_params_are_inverse(tiny, params):
    back = omni.get_params(omni.build(tiny, params))
    assert back.keys() == params.keys()
    assert all(back[name] is params[name] for name in params)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"lm_head.weight": None}, "'lm_head.weight' is missing"),
        ({"lm_head.bias": jnp.ones(3)}, "'lm_head.bias' is unknown"),
        ({"model.norm.weight": jnp.ones(3)}, r"'model.norm.weight' has shape \(3,\)"),
    ],
)
def test_build_names_the_odd_weight(tiny, params, change, message):
    changed = {name: w for name, w in {**params, **change}.items() if w is not None}
    with pytest.raises(UserError, match=message):
        omni.build(tiny, changed)


def test_stacking_is_invertible(tiny, params):
    stacked = omni.stack_layers(params)
    assert stacked["model.layers.mlp.up_proj.weight"].shape == (3, 96, 48)
    back = omni.unstack_layers(stacked)
    assert back.keys() == params.keys()
    assert all((back[name] == params[name]).all() for name in params)


def test_placeholders_take_audio_in_order(tiny, params):
    model, audio = omni.build(tiny, params), tiny.stream.format.audio
    tokens = jnp.array([[5, audio, audio, 6, audio], [audio, 7, 7, 7, 7]])
    vectors = jnp.arange(2 * 3 * 48.0).reshape(2, 3, 48)
    out = model.embed(tokens, vectors)
    table = params["model.embed_tokens.weight"]
    np.testing.assert_array_equal(out[0, jnp.array([1, 2, 4])], vectors[0])
    np.testing.assert_array_equal(out[1, 0], vectors[1, 0])
    np.testing.assert_array_equal(out[0, jnp.array([0, 3])], table[jnp.array([5, 6])])
    np.testing.assert_array_equal(out[1, 1], table[7])


def serve(config, params, tokens, mel, dtype=jnp.float32):
    """Logits [b, t, v] through encode and extend: a chunk, then tokens one by one."""
    graphdef, state = nnx.split(omni.build(config, params, dtype))
    fmt, logits = config.stream.format, np.full((*tokens.shape, config.text.vocab_size), np.nan)
    audio = [encode(graphdef, state, mel[:, c], jnp.full(len(mel), 40)) for c in range(CHUNKS)]
    for row, line in enumerate(tokens):
        cache = init_cache(config.text, 1, 64, dtype)
        t = chunk = 0
        while t < len(line):
            n = 10 if line[t] == fmt.audio else 1
            vectors = audio[chunk][row : row + 1] if n == 10 else None
            chunk += n == 10
            out, cache = extend(
                graphdef, state, cache, line[None, t : t + n], vectors, jnp.array([n])
            )
            t += n
            logits[row, t - 1] = out[0]
    return logits


def test_training_pass_equals_serving(tiny, params, stream):
    served = serve(tiny, params, *stream)
    trained = logits_of(tiny, omni.stack_layers(params), *stream)
    read = ~np.isnan(served[..., 0])
    assert read.sum() > 10
    assert np.abs(served[read] - trained[read]).max() <= 1e-5


def test_serving_rows_of_different_lengths(tiny, params, stream):
    """Rows of one batch, right-padded and behind caches of other lengths, equal single rows."""
    tokens, mel = stream
    graphdef, state = nnx.split(omni.build(tiny, params))
    audio = encode(graphdef, state, mel[:, 0], jnp.array([40, 40]))
    lengths = jnp.array([14, 11])
    together = init_cache(tiny.text, 2, 64)
    logits, together = extend(graphdef, state, together, tokens[:, :14], audio, lengths)
    more, together = extend(
        graphdef, state, together, jnp.array([[1, 2], [3, 0]]), None, jnp.array([2, 1])
    )
    assert together.length_b.tolist() == [16, 12]
    for row, (n, next_) in enumerate(((14, [1, 2]), (11, [3]))):
        alone = init_cache(tiny.text, 1, 64)
        one = functools.partial(extend, graphdef, state)
        a, alone = one(alone, tokens[row : row + 1, :n], audio[row : row + 1], jnp.array([n]))
        b, alone = one(alone, jnp.array([next_]), None, jnp.array([len(next_)]))
        np.testing.assert_allclose(logits[row], a[0], atol=1e-5)
        np.testing.assert_allclose(more[row], b[0], atol=1e-5)


def test_bfloat16_serving_stays_close(tiny, params, stream):
    """Tolerance: 5 % of the largest logit."""
    exact = serve(tiny, params, *stream)
    rough = serve(tiny, params, *stream, dtype=jnp.bfloat16)
    read = ~np.isnan(exact)
    assert np.abs(exact[read] - rough[read]).max() <= 0.05 * np.abs(exact[read]).max()


@functools.partial(jax.jit, static_argnums=0)
def logits_of(config, stacked, tokens, mel):
    return omni.unembed(config, stacked, omni.forward(config, stacked, tokens, mel))


@functools.partial(
    jax.jit,
    static_argnums=0,
    static_argnames=("remat", "scan", "dtype", "frozen_layers"),
    compiler_options={"xla_backend_optimization_level": 0},  # compiles in half the time
)
@functools.partial(jax.value_and_grad, argnums=1)
def loss_and_grad(config, stacked, tokens, mel, **how):
    """Cross entropy of the next token, whatever it is."""
    hidden = omni.forward(config, stacked, tokens, mel, **how)
    logp = jax.nn.log_softmax(omni.unembed(config, stacked, hidden)[:, :-1])
    return -jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1).mean()


def test_gradients_do_not_depend_on_remat_or_scan(tiny, params, stream):
    """Tolerance: 1e-5 of the largest entry of each gradient, plus 1e-7."""
    loss, grads = loss_and_grad(tiny, omni.stack_layers(params), *stream)
    assert np.isfinite(loss)
    for name, g in grads.items():
        assert np.isfinite(g).all() and (np.abs(g).max() > 0) == ("bos_eos" not in name), name
    for how in ({"remat": False}, {"remat": False, "scan": False}):
        other_loss, others = loss_and_grad(tiny, omni.stack_layers(params), *stream, **how)
        assert other_loss == pytest.approx(float(loss), rel=1e-6)
        for name, g in grads.items():
            assert np.abs(g - others[name]).max() <= 1e-5 * np.abs(g).max() + 1e-7, (how, name)


def test_gradients_are_those_of_finite_differences(tiny, params, stream):
    """Along a random direction, to 2 %."""
    stacked, rng = omni.stack_layers(params), np.random.default_rng(3)
    _, grads = loss_and_grad(tiny, stacked, *stream)
    step = {
        name: jnp.asarray(rng.standard_normal(w.shape) * 1e-3, w.dtype)
        for name, w in stacked.items()
    }
    up, _ = loss_and_grad(tiny, jax.tree.map(jnp.add, stacked, step), *stream)
    down, _ = loss_and_grad(tiny, jax.tree.map(jnp.subtract, stacked, step), *stream)
    slope = sum(float((grads[name] * step[name]).sum()) for name in grads)
    assert (float(up) - float(down)) / 2 == pytest.approx(slope, rel=0.02)


def test_bfloat16_training_has_float32_gradients(tiny, params, stream):
    """Tolerance: cosine >= 0.99 with the float32 gradient of every weight that matters."""
    _, exact = loss_and_grad(tiny, omni.stack_layers(params), *stream)
    loss, rough = loss_and_grad(tiny, omni.stack_layers(params), *stream, dtype=jnp.bfloat16)
    assert np.isfinite(loss)
    for name, g in exact.items():
        assert rough[name].dtype == jnp.float32
        if np.abs(g).max() > 0:
            cosine = (g * rough[name]).sum() / jnp.sqrt((g**2).sum() * (rough[name] ** 2).sum())
            assert cosine >= 0.99, name


def test_frozen_layers_take_no_gradient(tiny, params, stream):
    _, all_grads = loss_and_grad(tiny, omni.stack_layers(params), *stream)
    _, grads = loss_and_grad(tiny, omni.stack_layers(params), *stream, frozen_layers=1)
    for name, g in grads.items():
        if name.startswith("audio_tower.conv"):
            assert np.abs(g).max() == 0, name
        elif name.startswith("audio_tower.layers."):
            assert np.abs(g[0]).max() == 0, name
            np.testing.assert_allclose(g[1], all_grads[name][1], rtol=1e-4, atol=1e-6)
        else:
            np.testing.assert_allclose(g, all_grads[name], rtol=1e-4, atol=1e-6)
