"""Compile the Triton kernels for a GPU, and call them from JAX with the caches updated in place.

Compilation needs no GPU: Triton makes PTX for a named target, which travels inside the program
that JAX lowers (``triton_kernel_call_ffi`` of jaxlib loads it). Buffers bind by position, operands
then results; a result that aliases an operand is the same memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib import gpu_triton

from ai_jax.kernels.errors import KernelError
from ai_jax.kernels.plan import Device, Plan, Shape, least_power_of_2
from ai_jax.kernels.reference import Bias, Result, Rope, Scale

# The newest PTX that the drivers and linkers of CUDA 13.0 take; Triton's own compiler is newer.
PTX_VERSION = 90
POINTERS = {
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "float32": "*fp32",
    "float8_e4m3fn": "*fp8e4nv",
    "int32": "*i32",
}
# The fields of a launch's signature are in the kernels' order: first operands, then results.
PREPARE_OPERANDS = (
    "q", "k", "v", "k_cache", "v_cache", "cache_len", "chunk_len",
    "q_bias", "k_bias", "v_bias", "cos", "sin", "k_scale", "v_scale",
)  # fmt: skip
ATTEND_OPERANDS = PREPARE_OPERANDS
COMBINE_OPERANDS = ("part_out", "part_lse", "cache_len", "chunk_len")
IN_PLACE = {"k_cache": "k_cache_out", "v_cache": "v_cache_out"}

Pointers = tuple[tuple[str, str], ...]  # argument and dtype of those that are given
Constants = tuple[tuple[str, int | bool], ...]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One kernel, ready to be launched: PTX and what the launch needs."""

    name: str
    ptx: str
    warps: int
    shared_bytes: int
    capability: int
    cubin: bytes


@functools.cache
def compile_kernel(
    kernel: str, pointers: Pointers, constants: Constants, warps: int, stages: int, capability: int
) -> Compiled:
    """Compile ``prepare``, ``attend`` or ``combine``; arguments not in ``pointers`` are absent."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDAOptions, get_ptx_version_from_options
    from triton.compiler import ASTSource

    from ai_jax.kernels import chunk_attention

    fn = getattr(chunk_attention, kernel)
    given = {name: POINTERS[dtype] for name, dtype in pointers} | dict(constants)
    signature = {name: given.get(name) for name in fn.arg_names}
    source = ASTSource(
        fn,
        {n: v if isinstance(v, str) else "constexpr" for n, v in signature.items()},
        {n: v for n, v in signature.items() if not isinstance(v, str)},
        # XLA aligns every buffer to 256 bytes; 16 let loads be whole vectors.
        {
            (i,): [["tt.divisibility", 16]]
            for i, v in enumerate(signature.values())
            if isinstance(v, str)
        },
    )
    options = {
        "num_warps": warps,
        "num_stages": stages,
        "ptx_version": min(PTX_VERSION, get_ptx_version_from_options(CUDAOptions(), capability)),
        "enable_fp_fusion": True,
    }
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    meta = made.metadata
    if getattr(meta, "global_scratch_size", 0):
        raise KernelError(f"Triton {triton.__version__} wants scratch memory for {kernel}")
    return Compiled(
        meta.name, made.asm["ptx"], meta.num_warps, meta.shared, capability, made.asm["cubin"]
    )


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel with its grid, operands and results; all but the arrays."""

    kernel: str
    grid: tuple[int, int, int]
    operands: tuple[str, ...]
    results: tuple[tuple[str, tuple[int, ...], str], ...]  # name, shape, dtype
    constants: Constants
    warps: int
    stages: int

    def compiled(self, dtypes: dict[str, str], capability: int) -> Compiled:
        pointers = tuple((name, dtypes[name]) for name in self.operands)
        pointers += tuple((name, dtype) for name, _, dtype in self.results)
        return compile_kernel(
            self.kernel, pointers, self.constants, self.warps, self.stages, capability
        )


def launches(shape: Shape, plan: Plan, operands: tuple[str, ...], rope_batch: int) -> list[Launch]:
    """The launches of one call, in order; ``operands``: those of ``ATTEND_OPERANDS`` given."""
    b, t, kv, g = shape.batch, shape.chunk, shape.kv_heads, shape.groups
    d, s = shape.head_dim, shape.max_len
    sizes = {"T": t, "KV": kv, "G": g, "D": d, "S": s}
    caches = tuple(
        (name, (b, kv, s, d), shape.cache_dtype) for name in ("k_cache_out", "v_cache_out")
    )
    out = ("out", (b, t, kv * g, d), shape.dtype)
    parts = (
        ("part_out", (b * kv, plan.splits, t * g, d), "float32"),
        ("part_lse", (b * kv, plan.splits, t * g), "float32"),
    )
    block_g = least_power_of_2(g)
    todo = []
    if not plan.fused:
        constants = sizes | {"ROPE_B": rope_batch, "BLOCK_G": block_g}
        results = (("q_out", (b, t, kv * g, d), shape.dtype), *caches)
        todo.append(
            Launch("prepare", (b * kv, t + 1, 1), operands, results, tuple(constants.items()), 4, 1)
        )
        # What it did is not done again; its results come under the names of the operands.
        operands = tuple(
            x for x in operands if x in ("q", "k_cache", "v_cache", "cache_len", "chunk_len")
            or x in ("k_scale", "v_scale")
        )  # fmt: skip
    pieces = {"FUSED": plan.fused, "SPLIT": plan.split, "SPLITS": plan.splits}
    constants = sizes | {"ROPE_B": rope_batch if plan.fused else 1} | pieces
    constants |= {"BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n}
    results = (parts if plan.splits > 1 else (out,)) if not plan.fused else (
        ((out,) if plan.splits == 1 else ()) + caches + (parts if plan.splits > 1 else ())
    )  # fmt: skip
    grid = (b * kv, math.ceil(t * g / plan.block_m), plan.splits)
    todo.append(
        Launch("attend", grid, operands, results, tuple(constants.items()), plan.warps, plan.stages)
    )
    if plan.splits > 1:
        constants = sizes | pieces | {"BLOCK_G": block_g}
        todo.append(
            Launch(
                "combine", (b * kv, t, 1), COMBINE_OPERANDS, (out,), tuple(constants.items()), 4, 1
            )
        )
    return todo


def call(
    arrays: dict[str, jax.Array], shape: Shape, plan: Plan, device: Device, rope_batch: int
) -> Result:
    """The operation of ``reference.chunk_attention`` on a GPU; ``arrays``: operands by name."""
    arrays = dict(arrays)
    given = tuple(name for name in ATTEND_OPERANDS if name in arrays)
    for launch in launches(shape, plan, given, rope_batch):
        results = _ffi_call(launch, arrays, device.compute_capability)
        arrays |= results
        arrays |= {name: results[out] for name, out in IN_PLACE.items() if out in results}
        if "q_out" in results:
            arrays["q"] = results["q_out"]
    return Result(arrays["out"], arrays["k_cache"], arrays["v_cache"])


def _ffi_call(
    launch: Launch, arrays: dict[str, jax.Array], capability: int
) -> dict[str, jax.Array]:
    dtypes = {name: np.dtype(arrays[name].dtype).name for name in launch.operands}
    made = launch.compiled(dtypes, capability)
    kernel = gpu_triton.TritonKernel(
        made.name, made.warps, 1, made.shared_bytes, made.ptx, "", made.capability
    )
    count = len(launch.operands) + len(launch.results)
    pointers = [gpu_triton.create_array_parameter(0, 16) for _ in range(count)]
    opaque = gpu_triton.TritonKernelCall(kernel, *launch.grid, pointers).to_proto(made.name, b"")
    names = [name for name, _, _ in launch.results]
    alias = {
        launch.operands.index(operand): names.index(result)
        for operand, result in IN_PLACE.items()
        if result in names
    }
    outs = jax.ffi.ffi_call(
        "triton_kernel_call_ffi",
        [jax.ShapeDtypeStruct(s, jnp.dtype(d)) for _, s, d in launch.results],
        custom_call_api_version=4,
        input_output_aliases=alias,
    )(*(arrays[name] for name in launch.operands), name=made.name, opaque=zlib.compress(opaque))
    return dict(zip(names, outs, strict=True))


def operands(
    q_bthd: jax.Array,
    k_btkd: jax.Array,
    v_btkd: jax.Array,
    k_cache_bksd: jax.Array,
    v_cache_bksd: jax.Array,
    cache_len_b: jax.Array,
    chunk_len_b: jax.Array,
    bias: Bias | None,
    rope: Rope | None,
    scale: Scale | None,
) -> dict[str, Any]:
    """The arrays of a call under the names that the kernels give them, absent ones left out."""
    arrays = [q_bthd, k_btkd, v_btkd, k_cache_bksd, v_cache_bksd, cache_len_b, chunk_len_b]
    for group, count in ((bias, 3), (rope, 2), (scale, 2)):
        arrays += group if group is not None else [None] * count
    return {n: x for n, x in zip(ATTEND_OPERANDS, arrays, strict=True) if x is not None}
