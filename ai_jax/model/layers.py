"""Building blocks of the audio encoder and the decoder, with PyTorch's names and layouts.

Weights keep ``param_dtype``; activations have the module's ``dtype``. Every matrix product
accumulates in float32, and softmax, norms, activations and RoPE angles are computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ai_jax.kernels import xla

DType = Any
INIT_STD = 0.02  # Hugging Face's initializer_range
PRODUCT = "product"  # checkpoint name of what rematerialisation keeps: dear to compute


@jax.custom_vjp
def dot(x: jax.Array, w_oi: jax.Array) -> jax.Array:
    """``x @ w_oi.T`` with operands in x's dtype and the sum in float32.

    x: [..., i]; w_oi: [o, i], cast to x's dtype. Returns float32 [..., o]. In the backward pass the
    products have operands in x's dtype as well, and the weight's gradient is summed in float32.
    """
    x_ri = x.reshape(-1, x.shape[-1])
    rows = x_ri.shape[0]
    if rows == 1 and x.dtype == jnp.bfloat16:
        # XLA:CPU turns a product with one row into a loop over float32 copies of the weights.
        x_ri = jnp.concatenate([x_ri, x_ri])
    y_ro = jax.lax.dot_general(
        x_ri, w_oi.astype(x.dtype), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return y_ro[:rows].reshape(*x.shape[:-1], w_oi.shape[0])


def _dot_forward(x, w_oi):
    return dot(x, w_oi), (x, w_oi)


def _dot_backward(residuals, g):
    x, w_oi = residuals
    g_ro = g.astype(x.dtype).reshape(-1, g.shape[-1])
    x_ri = x.reshape(-1, x.shape[-1])
    dx_ri = jax.lax.dot_general(
        g_ro, w_oi.astype(x.dtype), (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    dw_oi = jax.lax.dot_general(
        g_ro, x_ri, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    return dx_ri.astype(x.dtype).reshape(x.shape), dw_oi.astype(w_oi.dtype)


dot.defvjp(_dot_forward, _dot_backward)


def gelu(x: jax.Array) -> jax.Array:
    """Exact (erf) GELU, computed in float32, in x's dtype."""
    x32 = x.astype(jnp.float32)
    # jax.nn.gelu(approximate=False) takes erfc, which costs several times as much on a CPU.
    return (0.5 * x32 * (1 + jax.lax.erf(x32 * np.float32(0.5**0.5)))).astype(x.dtype)


def silu(x: jax.Array) -> jax.Array:
    """SiLU, computed in float32, in x's dtype."""
    return jax.nn.silu(x.astype(jnp.float32)).astype(x.dtype)


def attention(
    q_bthd: jax.Array, k_bksd: jax.Array, v_bksd: jax.Array, mask_bts: jax.Array | None
) -> jax.Array:
    """Softmax attention with grouped queries as in ``xla.attention``, [b, t, h * d], kept by remat.

    mask_bts: bool, True where query t may read key s; None allows all.
    """
    out_bthd = xla.attention(q_bthd, k_bksd, v_bksd, mask_bts)
    return checkpoint_name(out_bthd.reshape(*out_bthd.shape[:2], -1), PRODUCT)


def causal_attention(q_bthd: jax.Array, k_bktd: jax.Array, v_bktd: jax.Array) -> jax.Array:
    """``attention`` in which query t reads keys 0..t, in blocks of queries.

    A block does not touch the keys behind it, which saves almost half of the work.
    """
    t = q_bthd.shape[1]
    block = max(128, -(-t // 8))
    out = []
    for start in range(0, t, block):
        end = min(start + block, t)
        mask_1ts = (jnp.arange(start, end)[:, None] >= jnp.arange(end))[None]
        out.append(
            attention(q_bthd[:, start:end], k_bktd[:, :, :end], v_bktd[:, :, :end], mask_1ts)
        )
    return jnp.concatenate(out, axis=1)


def rope_positions(places: jax.Array, fp16: bool) -> jax.Array:
    """What RoPE takes for the position of each place: itself, or its float16 rounding (float32)."""
    if not fp16:
        return places
    # Not astype: XLA may drop a conversion to float16 and back, and with it the rounding.
    return jax.lax.reduce_precision(places.astype(jnp.float32), exponent_bits=5, mantissa_bits=10)


def rope_angles(positions: jax.Array, head_dim: int, theta: float) -> jax.Array:
    """RoPE angles, float32 [..., head_dim / 2], of whole-numbered positions [...]."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inv_freq = np.float32(1) / np.float32(theta) ** exponent
    return positions[..., None].astype(jnp.float32) * inv_freq


def apply_layers(
    layers: nnx.Module,
    x: jax.Array,
    *args: Any,
    remat: bool = False,
    unroll: bool = False,
    frozen: int = 0,
) -> jax.Array:
    """Run ``x = layer(x, *args)`` through a list of layers or through one that holds all weights.

    A stacked layer (each weight has a leading axis of layers) runs in a ``lax.scan``; ``unroll``
    unrolls the scan. remat: for the backward pass keep the results of the linear maps and of
    attention, compute the rest again. frozen: no gradient flows into the first ``frozen`` layers,
    nor into what precedes them.
    """
    if isinstance(layers, nnx.List):
        for layer in layers:
            x = layer(x, *args)
        return x
    graphdef, stacked = nnx.split(layers)

    def body(x, state):
        return nnx.merge(graphdef, state)(x, *args), None

    if remat:
        policy = jax.checkpoint_policies.save_only_these_names(PRODUCT)
        body = jax.checkpoint(body, prevent_cse=unroll, policy=policy)
    if frozen:
        lower = jax.tree.map(lambda w: w[:frozen], stacked)
        stacked = jax.tree.map(lambda w: w[frozen:], stacked)
        x = jax.lax.stop_gradient(jax.lax.scan(body, x, lower, unroll=unroll)[0])
    return jax.lax.scan(body, x, stacked, unroll=unroll)[0]


def make_layers(make: Callable[[], nnx.Module], count: int, stacked: bool) -> nnx.Module:
    """``count`` layers in a list, or the one layer that is to hold the stacked weights of all."""
    return make() if stacked else nnx.List([make() for _ in range(count)])


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: DType) -> nnx.Param:
    return nnx.Param(INIT_STD * jax.random.normal(rngs.params(), shape, dtype))


class Linear(nnx.Module):
    """``y = x W^T + b``; weight [out, in], bias [out]."""

    def __init__(
        self,
        n_in: int,
        n_out: int,
        *,
        bias: bool,
        rngs: nnx.Rngs,
        dtype: DType,
        param_dtype: DType,
    ):
        self.weight = _normal(rngs, (n_out, n_in), param_dtype)
        self.bias = nnx.Param(jnp.zeros(n_out, param_dtype)) if bias else None
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        y = dot(x.astype(self.dtype), self.weight[...])
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return checkpoint_name(y.astype(self.dtype), PRODUCT)


class Conv1d(nnx.Module):
    """Convolution over time, kernel 3, zero padding 1 on both sides; weight [out, in, 3].

    It is the product of unfolded input with the flat weight: as fast as a library's convolution,
    in every dtype and on every backend, forward and backward.
    """

    def __init__(
        self,
        n_in: int,
        n_out: int,
        *,
        stride: int,
        rngs: nnx.Rngs,
        dtype: DType,
        param_dtype: DType,
    ):
        self.weight = _normal(rngs, (n_out, n_in, 3), param_dtype)
        self.bias = nnx.Param(jnp.zeros(n_out, param_dtype))
        self.stride = stride
        self.dtype = dtype

    def __call__(self, x_btc: jax.Array) -> jax.Array:
        """[b, t, in] -> [b, ceil(t / stride), out]."""
        b, t, c = x_btc.shape
        x_btc = jnp.pad(x_btc.astype(self.dtype), ((0, 0), (1, 1), (0, 0)))
        taps = [x_btc[:, i : i + t : self.stride] for i in range(3)]
        unfolded = jnp.stack(taps, axis=-1).reshape(b, -1, c * 3)
        y = dot(unfolded, self.weight[...].reshape(-1, c * 3)) + self.bias[...].astype(jnp.float32)
        return y.astype(self.dtype)


class Embedding(nnx.Module):
    """A table of rows; weight [count, width]."""

    def __init__(self, count: int, width: int, *, rngs: nnx.Rngs, dtype: DType, param_dtype: DType):
        self.weight = _normal(rngs, (count, width), param_dtype)
        self.dtype = dtype

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.weight[...][ids].astype(self.dtype)


class LayerNorm(nnx.Module):
    """LayerNorm over the last axis with weight and bias, eps 1e-5, all in float32."""

    def __init__(self, width: int, *, dtype: DType, param_dtype: DType):
        self.weight = nnx.Param(jnp.ones(width, param_dtype))
        self.bias = nnx.Param(jnp.zeros(width, param_dtype))
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        x = x - x.mean(-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)
        return (x * self.weight[...] + self.bias[...]).astype(self.dtype)


class RMSNorm(nnx.Module):
    """RMSNorm over the last axis: normalised in float32, cast, then multiplied by the weight."""

    def __init__(self, width: int, eps: float, *, dtype: DType, param_dtype: DType):
        self.weight = nnx.Param(jnp.ones(width, param_dtype))
        self.eps = eps
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.eps)
        return x.astype(self.dtype) * self.weight[...].astype(self.dtype)
