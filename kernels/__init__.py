"""Fused chunk attention and KV append: reference, Triton kernel, call from JAX, benchmark."""
