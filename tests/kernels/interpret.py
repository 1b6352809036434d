"""Run the Triton kernels on NumPy arrays, program by program, counting the memory they touch.

Triton's own interpreter evaluates the kernels' Python. What is ours: arrays in place of torch
tensors, the order of the programs, exact bfloat16 and float8 (Triton's interpreter truncates casts
and multiplies raw bits), and a record of every byte read and written.
"""

from __future__ import annotations

import contextlib
import itertools
import types

import ml_dtypes
import numpy as np
import pytest

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter as ti  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

SMALL = {tl.bfloat16: ml_dtypes.bfloat16, tl.float8e4nv: ml_dtypes.float8_e4m3fn}
NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "fp8e4nv"}
NAMES |= {"int32": "i32"}


class Counter:
    """Bytes touched of each array, by its name: ``read`` and ``written``, one count per access."""

    def __init__(self):
        self.arrays: dict[str, tuple[int, int]] = {}
        self.read: dict[str, list[np.ndarray]] = {}
        self.written: dict[str, list[np.ndarray]] = {}

    def note(self, log: dict, addresses: np.ndarray, mask: np.ndarray) -> None:
        touched = np.broadcast_to(addresses, mask.shape)[mask]
        if touched.size == 0:
            return
        for name, (start, end) in self.arrays.items():
            inside = (touched >= start) & (touched < end)
            if inside.any():
                assert inside.all(), f"one access touches {name} and memory beyond it"
                log.setdefault(name, []).append(touched - np.uint64(start))
                return
        raise AssertionError("access to memory that belongs to no array")


def exact(data: np.ndarray, kind) -> np.ndarray:
    """The numbers that raw bits of a small float stand for."""
    return data.view(SMALL[kind]) if kind in SMALL else data


@contextlib.contextmanager
def interpreted(module: types.ModuleType, counter: Counter):
    """Within it the ``@triton.jit`` functions of ``module`` and of Triton are plain Python."""
    saved = []

    def patch(owner, name, value):
        saved.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    for owner in (tl, tl.standard, module):
        for name, value in list(vars(owner).items()):
            if isinstance(value, JITFunction):
                patch(owner, name, ti.InterpretedFunction(value.fn))
    builder = ti.InterpreterBuilder

    def cast(self, src, dst_type, rounding_mode=None):
        dst = dst_type.scalar
        data = exact(src.data, src.dtype.scalar)
        if dst in SMALL:
            data = data.astype(np.float32).astype(SMALL[dst]).view(ti._get_np_dtype(dst))
        else:
            data = data.astype(ti._get_np_dtype(dst))
        return ti.TensorHandle(data, dst)

    def dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        a_data, b_data = (exact(x.data, x.dtype.scalar).astype(np.float32) for x in (a, b))
        return ti.TensorHandle(a_data @ b_data + d.data, d.dtype.scalar)

    load, store = builder.create_masked_load, builder.create_masked_store

    def boolean(mask):  # the interpreter widens the product of two masks
        return ti.TensorHandle(mask.data.astype(bool), tl.int1)

    def counted_load(self, ptrs, mask, *args):
        mask = boolean(mask)
        counter.note(counter.read, ptrs.data, mask.data)
        return load(self, ptrs, mask, *args)

    def counted_store(self, ptrs, value, mask, *args):
        mask = boolean(mask)
        counter.note(counter.written, ptrs.data, mask.data)
        return store(self, ptrs, value, mask, *args)

    patch(builder, "create_fp_trunc", lambda self, src, ty: cast(self, src, ty))
    patch(builder, "create_fp_ext", lambda self, src, ty: cast(self, src, ty))
    patch(builder, "create_fp_to_fp", cast)
    patch(builder, "create_dot", dot)
    patch(builder, "create_masked_load", counted_load)
    patch(builder, "create_masked_store", counted_store)
    try:
        yield
    finally:
        for owner, name, value in reversed(saved):
            setattr(owner, name, value)


def pointer(x: np.ndarray) -> tl.tensor:
    assert x.flags.c_contiguous
    ty = tl.str_to_ty("*" + NAMES[x.dtype.name], None)
    return tl.tensor(ti.TensorHandle(np.array([x.ctypes.data], np.uint64), ty), ty)


def run(
    kernel: JITFunction,
    grid: tuple[int, ...],
    arrays: dict[str, np.ndarray | None],
    constants: dict[str, int | bool],
    *,
    reverse: bool = False,
    module: types.ModuleType,
) -> Counter:
    """Run every program of ``kernel``, the last first if ``reverse``; arrays are changed in place.

    An access outside of the named arrays is an error.
    """
    counter = Counter()
    present = {name: x for name, x in arrays.items() if x is not None}
    counter.arrays = {
        name: (x.ctypes.data, x.ctypes.data + x.nbytes) for name, x in present.items()
    }
    grid = (*grid, 1, 1)[:3]
    with interpreted(module, counter), np.errstate(all="ignore"):
        fn = ti.InterpretedFunction(kernel.fn).rewrite()
        scope = ti._patch_lang(kernel.fn)
        ti.interpreter_builder.set_grid_dim(*grid)
        args = {name: None if x is None else pointer(x) for name, x in arrays.items()}
        order = list(itertools.product(*map(range, grid)))
        try:
            for index in reversed(order) if reverse else order:
                ti.interpreter_builder.set_grid_idx(*index)
                fn(**args, **constants)
        finally:
            scope.restore()
    return counter
