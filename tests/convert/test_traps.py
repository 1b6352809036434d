"""The parity tests catch each mistake that a port of this model is known to make.

A trap is an edit of our source. While it is in force, a test of parity with transformers must fail.
"""

import dataclasses
import inspect
import textwrap
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
import test_parity as parity  # noqa: E402
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as theirs  # noqa: E402

from ai_jax.kernels import xla  # noqa: E402
from ai_jax.model import audio_encoder, decoder, layers, omni  # noqa: E402

pytestmark = pytest.mark.torch


# The parity tests, as they are.


def encoder(pair):
    parity.test_encoder_on_chunks_and_a_partial_last_one(pair, 103)


def decoder_modules(pair):
    parity.test_decoder_modules(pair)


def logits(pair):
    parity.test_logits("pair", 103, types.SimpleNamespace(getfixturevalue=lambda _: pair))


def cache(pair):
    with jax.disable_jit(False):  # it takes many steps: compiling them anew is the faster way
        parity.extend.clear_cache()
        try:
            parity.test_prefill_and_decode_through_the_cache(pair)
        finally:
            parity.extend.clear_cache()


def rounding_of_rms_norm(pair):
    """The order of multiplying and rounding shows in low precision alone."""
    width = pair.config.text.hidden_size
    x, weight = parity.normal(0, 100, width), parity.normal(1, width)
    reference = theirs.Qwen2_5OmniRMSNorm(width, eps=1e-6).to(torch.bfloat16)
    reference.weight.data = torch.tensor(weight).to(torch.bfloat16)
    with torch.no_grad():
        want = reference(torch.tensor(x).to(torch.bfloat16)).float().numpy()
    ours = layers.RMSNorm(width, 1e-6, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    ours.weight[...] = jnp.asarray(weight, jnp.bfloat16)
    got = np.asarray(ours(jnp.asarray(x, jnp.bfloat16)).astype(jnp.float32))
    # The mean of squares is summed in another order, which may tip a rounding once in a while.
    assert np.mean(got != want) < 1e-3


@dataclasses.dataclass(frozen=True)
class Trap:
    """Edits (old, new) of the function or method ``name`` as ``owner`` sees it."""

    caught_by: Callable
    owner: Any
    name: str
    edits: tuple[tuple[str, str], ...]


def trap(caught_by, owner, name, *edits):
    return Trap(caught_by, owner, name, edits)


ENCODER = audio_encoder.AudioEncoder
ATTENTION_HEADS = "q_bthd.reshape(b, t, k, h // k, d).transpose(0, 2, 3, 1, 4)"
POOL = "x_btd[:, : t // 2 * 2].reshape(b, t // 2, 2, d).astype(jnp.float32).mean(2)"

TRAPS = {
    # Audio encoder.
    "SAME padding before a stride of 2": trap(
        encoder,
        layers.Conv1d,
        "__call__",
        ("(1, 1), (0, 0)))", "(0, 2) if self.stride == 2 else (1, 1), (0, 0)))"),
    ),
    "padding not zero again after conv1": trap(
        encoder, ENCODER, "__call__", ("x_bfd * valid_bf1", "x_bfd")
    ),
    "padding of the mel frames read": trap(
        encoder, ENCODER, "__call__", ("jnp.where(valid_bf1, mel_bfm, 0)", "mel_bfm")
    ),
    "padding attended to": trap(
        encoder,
        ENCODER,
        "__call__",
        ("_below(_after_conv(frames_b), x_btd.shape[1])[:, None, :]", "None"),
    ),
    "positions go on over chunks": trap(
        encoder,
        ENCODER,
        "__call__",
        (
            "_sinusoids(*x_btd.shape[1:])",
            "_sinusoids(x_btd.shape[0] * x_btd.shape[1], x_btd.shape[2]).reshape(x_btd.shape)",
        ),
    ),
    "sines and cosines interleaved": trap(
        encoder,
        audio_encoder,
        "_sinusoids",
        (
            "np.concatenate([np.sin(angle), np.cos(angle)], axis=1)",
            "np.stack([np.sin(angle), np.cos(angle)], axis=2).reshape(length, width)",
        ),
    ),
    "timescales of another position table": trap(
        encoder, audio_encoder, "_sinusoids", ("(width // 2 - 1)", "(width // 2)")
    ),
    "causal attention in the encoder": trap(
        encoder,
        ENCODER,
        "__call__",
        (
            "self.layers, x_btd, mask_bts",
            "self.layers, x_btd, mask_bts & jnp.tril(jnp.ones((20, 20), bool))",
        ),
    ),
    "chunks attend to each other": trap(
        encoder,
        ENCODER,
        "__call__",
        (
            "apply_layers(self.layers, x_btd, mask_bts, **how)",
            "apply_layers(self.layers, x_btd.reshape(1, -1, x_btd.shape[2]), "
            "mask_bts.reshape(1, 1, -1), **how).reshape(x_btd.shape)",
        ),
    ),
    "ln_post before the mean of pairs": trap(
        encoder,
        ENCODER,
        "__call__",
        (POOL, POOL.replace("x_btd", "self.ln_post(x_btd)")),
        ("self.ln_post(x_bnd.astype(self.dtype))", "x_bnd"),
    ),
    "every second position instead of the mean of pairs": trap(
        encoder, ENCODER, "__call__", (".mean(2)", "[:, :, 0]")
    ),
    "GELU by tanh": trap(
        encoder,
        audio_encoder,
        "gelu",
        (
            "(0.5 * x32 * (1 + jax.lax.erf(x32 * np.float32(0.5**0.5))))",
            "jax.nn.gelu(x32)",
        ),
    ),
    "LayerNorm with eps 1e-6": trap(encoder, layers.LayerNorm, "__call__", ("1e-5", "1e-6")),
    "post-norm instead of pre-norm": trap(
        encoder,
        audio_encoder.AudioLayer,
        "__call__",
        (
            "x_btd + self.self_attn(self.self_attn_layer_norm(x_btd), mask_bts)",
            "self.self_attn_layer_norm(x_btd + self.self_attn(x_btd, mask_bts))",
        ),
    ),
    "biases forgotten": trap(
        encoder, layers.Linear, "__call__", ("self.bias is not None", "False")
    ),
    "bias of a convolution forgotten": trap(
        encoder, layers.Conv1d, "__call__", (" + self.bias[...].astype(jnp.float32)", "")
    ),
    # Decoder.
    "RMSNorm with eps 1e-5": trap(
        decoder_modules, layers.RMSNorm, "__call__", ("self.eps", "1e-5")
    ),
    "RMSNorm multiplied by its weight before the rounding": trap(
        rounding_of_rms_norm,
        layers.RMSNorm,
        "__call__",
        (
            "x.astype(self.dtype) * self.weight[...].astype(self.dtype)",
            "(x * self.weight[...].astype(jnp.float32)).astype(self.dtype)",
        ),
    ),
    "RMSNorm that subtracts the mean": trap(
        logits,
        layers.RMSNorm,
        "__call__",
        ("jnp.square(x).mean(-1, keepdims=True)", "x.var(-1, keepdims=True)"),
    ),
    "RoPE turns neighbours, not halves": trap(
        logits,
        decoder,
        "rotate",
        ("jnp.split(x, 2, axis=-1)", "x[..., ::2], x[..., 1::2]"),
        (
            "jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)",
            "jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)",
        ),
    ),
    "RoPE turns the other way": trap(
        logits,
        decoder,
        "rotate",
        ("a * cos - b * sin, b * cos + a * sin", "a * cos + b * sin, b * cos - a * sin"),
    ),
    "theta of the RoPE": trap(
        logits, decoder, "rope_angles", ("np.float32(theta)", "np.float32(1e4)")
    ),
    "RoPE frequencies rounded to bfloat16": trap(
        logits, decoder, "rope_angles", ("* inv_freq", "* inv_freq.astype(jnp.bfloat16)")
    ),
    "sound and text on different positions": trap(
        logits,
        decoder.Decoder,
        "__call__",
        ("jnp.arange(x_btd.shape[1])", "jnp.maximum(jnp.arange(x_btd.shape[1]) - 10, 0)"),
    ),
    "positions start over in a cached step": trap(
        cache,
        decoder.Decoder,
        "extend",
        ("cache.length_b[:, None] + jnp.arange", "0 * cache.length_b[:, None] + jnp.arange"),
    ),
    "padding of a row written into the cache": trap(
        cache,
        decoder.Decoder,
        "extend",
        ("cache.length_b + lengths_b", "cache.length_b + x_btd.shape[1]"),
    ),
    "grouped queries in the order of strides": trap(
        logits,
        xla,
        "attention",
        (ATTENTION_HEADS, "q_bthd.reshape(b, t, h // k, k, d).transpose(0, 3, 2, 1, 4)"),
        ("o_bkgtd.transpose(0, 3, 1, 2, 4)", "o_bkgtd.transpose(0, 3, 2, 1, 4)"),
    ),
    "attention without its scale": trap(logits, xla, "attention", (" * d**-0.5", "")),
    "softmax in bfloat16": trap(
        logits,
        xla,
        "attention",
        ("softmax(scores_bkgts, ", "softmax(scores_bkgts.astype(jnp.bfloat16), "),
    ),
    "attention to the future": trap(
        logits, decoder, "causal_attention", ("[:, None] >= jnp", "[:, None] > -1 + 0 * jnp")
    ),
    "gate and up swapped": trap(
        logits,
        decoder.MLP,
        "__call__",
        ("self.gate_proj(x_btd)) * self.up_proj(", "self.up_proj(x_btd)) * self.gate_proj("),
    ),
    "GELU in place of SiLU": trap(logits, decoder, "silu", ("jax.nn.silu(", "jax.nn.gelu(")),
    "final norm forgotten": trap(logits, decoder.Decoder, "__call__", ("self.norm(", "(")),
    "head tied to the embedding": trap(
        logits,
        omni.AudioInteractionModel,
        "logits",
        ("if tied else self.lm_head", "if True else self.lm_head"),
    ),
    "sound one placeholder late": trap(
        logits, omni.AudioInteractionModel, "embed", (", axis=1) - 1,", ", axis=1) - 2,")
    ),
}


@pytest.fixture(scope="module")
def pair(tiny):
    return parity.make_pair(tiny)


@pytest.fixture(autouse=True)
def uncompiled():
    """Nothing compiled of the sound model can stand in for a broken one, nor the reverse."""
    with jax.disable_jit():
        yield


def edited(function, *edits):
    """The function with its source edited; a trap whose line is gone is an error."""
    text = textwrap.dedent(inspect.getsource(function))
    for old, new in edits:
        assert text.count(old) == 1, f"the trap's place is gone or not unique: {old}"
        text = text.replace(old, new)
    scope = {}
    exec(f"from __future__ import annotations\n{text}", function.__globals__, scope)
    return scope[function.__name__]


@pytest.mark.parametrize("check", [encoder, decoder_modules, logits, cache, rounding_of_rms_norm])
def test_the_sound_model_passes(pair, check):
    check(pair)


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_is_caught(pair, monkeypatch, name):
    broken = TRAPS[name]
    function = edited(getattr(broken.owner, broken.name), *broken.edits)
    monkeypatch.setattr(broken.owner, broken.name, function)
    with pytest.raises(AssertionError):
        broken.caught_by(pair)
