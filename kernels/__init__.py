"""Fused chunk attention and KV append: reference, Triton kernel, call from JAX, benchmark."""

from ai_jax.kernels.errors import KernelError
from ai_jax.kernels.ops import assume_device, chunk_attention, shard
from ai_jax.kernels.reference import Bias, Result, Rope, Scale

__all__ = [
    "Bias",
    "KernelError",
    "Result",
    "Rope",
    "Scale",
    "assume_device",
    "chunk_attention",
    "shard",
]
