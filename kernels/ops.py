"""The one public operation: append a chunk to the caches and attend, on the backend that fits."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib.util
import logging
from collections.abc import Callable, Iterator
from typing import Literal

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxlib import gpu_triton

from ai_jax.kernels import call, xla
from ai_jax.kernels.errors import KernelError
from ai_jax.kernels.plan import Device, Plan, Shape, check, device_for, devices, plan
from ai_jax.kernels.reference import Bias, Result, Rope, Scale

Backend = Literal["auto", "xla", "triton"]
log = logging.getLogger("ai_jax.kernels")
_assumed: contextvars.ContextVar[Device | None] = contextvars.ContextVar("device", default=None)


def chunk_attention(
    q_bthd: jax.Array,
    k_btkd: jax.Array,
    v_btkd: jax.Array,
    k_cache_bksd: jax.Array,
    v_cache_bksd: jax.Array,
    cache_len_b: jax.Array,
    chunk_len_b: jax.Array,
    *,
    bias: Bias | None = None,
    rope: Rope | None = None,
    scale: Scale | None = None,
    backend: Backend = "auto",
    fused: bool | None = None,
) -> Result:
    """Append each stream's chunk to its cache, then let the chunk attend to cache and chunk.

    ``ai_jax.kernels.reference.chunk_attention`` defines arguments and result. Donate the caches:
    they are updated in place.

    backend: "xla" runs anywhere, with chunks of any length, if what the caches hold beyond a
    stream's length is finite. "triton" needs a CUDA GPU, chunks of at most 16 tokens, bfloat16 or
    float16, and contiguous arrays on one device (``shard`` makes that of a mesh). "auto" takes
    Triton where it can run and logs the choice once. fused: one Triton kernel or two launches;
    None leaves it to the plan for the device.

    Raises KernelError (a ValueError) for arguments that do not fit together, for "triton" where it
    cannot run, with the reason, and under differentiation: there is no backward pass.
    """
    arrays = call.operands(
        q_bthd, k_btkd, v_btkd, k_cache_bksd, v_cache_bksd, cache_len_b, chunk_len_b,
        bias, rope, scale,
    )  # fmt: skip
    shape = _shape(arrays)
    if backend not in ("auto", "xla", "triton"):
        raise KernelError(f'backend must be "auto", "xla" or "triton" (got {backend!r})')
    if backend == "xla":
        return _run(None, arrays)
    try:
        device = gpu()
        check(shape, device)
        made = plan(shape, device, fused=fused)
    except KernelError as error:
        if backend == "triton":
            raise
        _log_once(f"chunk_attention runs on XLA: {error}")
        return _run(None, arrays)
    _log_once(f"chunk_attention runs the Triton kernel for {device.device} ({device.target})")
    return _run((shape, made, device), arrays)


def shard(
    mesh: Mesh, *, batch: str | None = None, kv_heads: str | None = None, **options
) -> Callable[..., Result]:
    """``chunk_attention`` on a mesh whose axes split the batch and the KV heads.

    Every device runs its own streams and heads, and nothing is exchanged. options: as those of
    ``chunk_attention`` that are not arrays. bias, rope and scale are keyword arguments as there.
    """
    rows, lens = P(batch, None, kv_heads), P(batch)
    caches, per_head = P(batch, kv_heads), P(kv_heads)

    def sharded(*arrays: jax.Array, bias=None, rope=None, scale=None) -> Result:
        rope_spec = P() if rope is None or rope.cos_btr.shape[0] == 1 else P(batch)

        def local(arrays, extra):
            bias, rope, scale = extra
            return chunk_attention(*arrays, bias=bias, rope=rope, scale=scale, **options)

        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(
                (rows, rows, rows, caches, caches, lens, lens),
                (per_head, rope_spec, per_head),
            ),
            out_specs=Result(rows, caches, caches),
            check_vma=False,
        )(arrays, (bias, rope, scale))

    return sharded


@contextlib.contextmanager
def assume_device(name: str) -> Iterator[Device]:
    """Within it programs are lowered for a GPU that need not be there: "sm_90", or part of a name.

    With ``jax.jit(f).trace(...).lower(lowering_platforms=("cuda",))`` a machine without a GPU
    makes the program of one that has it.
    """
    found = [d for d in devices() if d.target == name or name.lower() in d.device.lower()]
    if not found:
        known = ", ".join(sorted({d.target for d in devices()} | {d.device for d in devices()}))
        raise KernelError(f"no device is known as {name!r}: take one of {known}")
    token = _assumed.set(found[0])
    try:
        yield found[0]
    finally:
        _assumed.reset(token)


def gpu() -> Device:
    """The kind of GPU that Triton programs are made for; KernelError says why there is none."""
    missing = [
        package
        for package, there in (
            ("triton", importlib.util.find_spec("triton") is not None),
            ("jax[cuda13]", hasattr(gpu_triton, "TritonKernel")),
        )
        if not there
    ]
    if missing:
        raise KernelError(
            f"the Triton kernel needs {' and '.join(missing)}, not installed here: "
            'pip install "ai-jax[cuda13]", or take backend="xla"'
        )
    if _assumed.get() is not None:
        return _assumed.get()
    if jax.default_backend() != "gpu":
        raise KernelError(
            f"the Triton kernel needs a CUDA GPU, and JAX runs on {jax.default_backend()}: take "
            'backend="xla", or install jax[cuda13] on a machine with a GPU'
        )
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", ""))
    if not capability.replace(".", "").isdigit():
        raise KernelError(
            f'the Triton kernel is for CUDA GPUs (this is {device.device_kind}): take backend="xla"'
        )
    return device_for(device.device_kind, round(10 * float(capability)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run(how: tuple[Shape, Plan, Device] | None, arrays: dict[str, jax.Array]) -> Result:
    bias, rope, scale = (
        kind(*(arrays[x] for x in names)) if names[0] in arrays else None
        for kind, names in (
            (Bias, ("q_bias", "k_bias", "v_bias")),
            (Rope, ("cos", "sin")),
            (Scale, ("k_scale", "v_scale")),
        )
    )
    if how is None:
        required = [arrays[name] for name in call.ATTEND_OPERANDS[:7]]
        return xla.chunk_attention(*required, bias=bias, rope=rope, scale=scale)
    return call.call(arrays, *how, 1 if rope is None else rope.cos_btr.shape[0])


@_run.defjvp
def _no_derivative(how, primals, tangents):
    raise KernelError(
        "chunk_attention has no derivative, it is for serving: train with the model's causal "
        "attention over whole streams (Decoder.__call__)"
    )


def _shape(arrays: dict[str, jax.Array]) -> Shape:
    """Check that the arrays fit together; KernelError names the first that does not."""
    q, k, cache = (arrays[x] for x in ("q", "k", "k_cache"))
    for name, x in (("q", q), ("k", k), ("k_cache", cache)):
        if x.ndim != 4:
            raise KernelError(f"{name} must have 4 axes (got shape {x.shape})")
    (b, t, h, d), kv, s = q.shape, k.shape[2], cache.shape[2]
    if min(b, t, h, d, kv, s) == 0 or h % kv or d % 2:
        raise KernelError(
            f"query heads must be a multiple of KV heads, head_dim even, and no axis empty (got q "
            f"{q.shape}, k {k.shape}, cache {cache.shape})"
        )
    rope_b = arrays["cos"].shape[0] if "cos" in arrays and arrays["cos"].shape[0] == 1 else b
    wanted = {
        "k": (b, t, kv, d), "v": (b, t, kv, d), "k_cache": (b, kv, s, d), "v_cache": (b, kv, s, d),
        "cache_len": (b,), "chunk_len": (b,), "q_bias": (h, d), "k_bias": (kv, d),
        "v_bias": (kv, d), "cos": (rope_b, t, d // 2), "sin": (rope_b, t, d // 2),
        "k_scale": (kv,), "v_scale": (kv,),
    }  # fmt: skip
    for name, shape in wanted.items():
        if name in arrays and arrays[name].shape != shape:
            raise KernelError(f"{name} must have shape {shape} (got {arrays[name].shape})")
    types = {name: np.dtype(x.dtype).name for name, x in arrays.items()}
    same = [("k", "q"), ("v", "q"), ("v_cache", "k_cache")]
    for name, other in same:
        if types[name] != types[other]:
            raise KernelError(
                f"{name} must have the dtype of {other}, {types[other]} (got {types[name]})"
            )
    for name in ("cache_len", "chunk_len"):
        if types[name] != "int32":
            raise KernelError(f"{name} must be int32 (got {types[name]})")
    small = types["k_cache"].startswith("float8")
    if small and "k_scale" not in arrays:
        raise KernelError(
            "a float8 cache needs scale=Scale(k, v), float32 numbers for each KV head"
        )
    if not small and "k_scale" in arrays:
        raise KernelError(f"scale is for float8 caches (got {types['k_cache']}): leave it out")
    return Shape(b, t, kv, h // kv, d, s, types["q"], types["k_cache"])


@functools.cache
def _log_once(text: str) -> None:
    log.info(text)
