"""Which kernels run with which block sizes: a function of the compiled shape and the device alone.

Nothing here looks at the lengths of streams, so a stream's result does not depend on the others.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import math
from pathlib import Path
from typing import Any

from ai_jax.kernels.errors import KernelError

MAX_CHUNK = 16  # rows of a chunk that one tile of keys holds
HEAD_DIMS = (64, 128)
ROWS = (16, 32, 64, 128)  # query rows of a tile: the sides of matrix products


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a compiled call is made for; ``dtype`` and ``cache_dtype`` are NumPy's names."""

    batch: int
    chunk: int
    kv_heads: int
    groups: int  # query heads of each KV head
    head_dim: int
    max_len: int
    dtype: str = "bfloat16"
    cache_dtype: str = "bfloat16"

    @property
    def cache_bits(self) -> int:
        return 8 if self.cache_dtype.startswith("float8") else 16


@dataclasses.dataclass(frozen=True)
class Config:
    """Block sizes for one bucket of shapes: cache dtype, head size and query rows of a tile.

    fused: the variant of least modelled cost. One kernel moves fewer bytes (q is not written and
    read again) and is one launch fewer (2 to 3 us); two launches pay where attention without
    RoPE needs so few registers that more programs fit on a processor.
    """

    cache_bits: int
    head_dim: int
    rows: int
    fused: bool
    block_n: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class Device:
    """A kind of GPU and the configurations chosen for it.

    match: part of the name that the driver gives. source: where the configurations come from.
    """

    device: str
    match: str
    compute_capability: int
    sms: int
    l2_mib: int
    hbm_gb_s: float
    dense_tflop_s: float
    shared_kib: int
    source: str
    entries: tuple[Config, ...]

    @property
    def target(self) -> str:
        return f"sm_{self.compute_capability}"

    @property
    def has_float8(self) -> bool:
        return self.compute_capability >= 89


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one call runs.

    fused: one kernel adds bias and RoPE, appends and attends; else a first one prepares. block_m:
    query rows of a tile; split: places of the cache that one program reads; splits: programs that
    share the longest cache.
    """

    fused: bool
    block_m: int
    block_n: int
    warps: int
    stages: int
    split: int
    splits: int


def least_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def plan(shape: Shape, device: Device, *, fused: bool | None = None) -> Plan:
    """The plan for a shape that passed ``check``.

    The cache is split so that a batch of streams gives every processor several programs, while a
    large batch, which has enough of them, is not split into more pieces than it needs: pieces of
    32 places for each tile that runs beside it, at least 256 (below, reduction costs more than the
    wait for memory) and at most 4096.
    """
    rows = min(max(least_power_of_2(shape.chunk * shape.groups), ROWS[0]), ROWS[-1])
    config = next(
        e
        for e in device.entries
        if (e.cache_bits, e.head_dim, e.rows) == (shape.cache_bits, shape.head_dim, rows)
    )
    tiles = shape.batch * shape.kv_heads * math.ceil(shape.chunk * shape.groups / rows)
    split = min(max(least_power_of_2(32 * tiles), 256), 4096)
    return Plan(
        fused=config.fused if fused is None else fused,
        block_m=rows,
        block_n=config.block_n,
        warps=config.warps,
        stages=config.stages,
        split=split,
        splits=max(1, math.ceil(shape.max_len / split)),
    )


def check(shape: Shape, device: Device) -> None:
    """Raise KernelError where the Triton kernel cannot serve the shape on the device."""
    if not 1 <= shape.chunk <= MAX_CHUNK:
        raise KernelError(
            f"the Triton kernel takes chunks of 1 to {MAX_CHUNK} tokens (got {shape.chunk}): feed "
            'longer ones in pieces, or take backend="xla"'
        )
    if shape.head_dim not in HEAD_DIMS:
        raise KernelError(
            f"the Triton kernel takes heads of {' or '.join(map(str, HEAD_DIMS))} numbers "
            f'(got {shape.head_dim}): take backend="xla"'
        )
    if shape.dtype not in ("bfloat16", "float16"):
        raise KernelError(
            f"the Triton kernel takes bfloat16 or float16 (got {shape.dtype}): cast q, k and v, "
            'or take backend="xla"'
        )
    if shape.cache_dtype not in (shape.dtype, "float8_e4m3fn"):
        raise KernelError(
            f"the Triton kernel takes a cache of {shape.dtype} or float8_e4m3fn for "
            f'{shape.dtype} queries (got {shape.cache_dtype}): cast it, or take backend="xla"'
        )
    if shape.cache_bits == 8 and not device.has_float8:
        raise KernelError(
            f"{device.device} has no float8 (compute capability 8.9 and newer have): take a cache "
            f'of {shape.dtype}, or backend="xla"'
        )


def read_device(text: str, name: str) -> Device:
    """A device from JSON, strictly: every field known and possible, every bucket present once."""
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise KernelError(f"{name} is no JSON ({error}): restore it") from None
    entries = fields.pop("entries", None) if isinstance(fields, dict) else None
    if not isinstance(entries, list):
        raise KernelError(f"{name} has no list 'entries': restore it")
    configs = tuple(_strict(Config, e, f"{name}, entry {i}") for i, e in enumerate(entries))
    device = _strict(Device, fields | {"entries": configs}, name)
    buckets = [(e.cache_bits, e.head_dim, e.rows) for e in configs]
    widths = (16, 8) if device.has_float8 else (16,)
    wanted = [(bits, d, rows) for bits in widths for d in HEAD_DIMS for rows in ROWS]
    if sorted(buckets) != sorted(wanted):
        twice = {b for b in buckets if buckets.count(b) > 1}
        odd = set(wanted).symmetric_difference(buckets) | twice
        raise KernelError(
            f"{name} must have one entry for each (cache_bits, head_dim, rows); missing, unknown "
            f"or twice there: {', '.join(map(str, sorted(odd)))}"
        )
    for e in configs:
        # Keys and values of each stage lie in shared memory, the queries beside them.
        need = (e.stages * 2 * e.block_n * e.cache_bits // 8 + e.rows * 2) * e.head_dim
        if not (e.block_n in ROWS and e.warps in (1, 2, 4, 8) and 1 <= e.stages <= 8):
            raise KernelError(f"{name}: impossible block_n, warps or stages in {e}: correct it")
        if need > device.shared_kib * 1024:
            raise KernelError(
                f"{name}: {e} needs {need} bytes of shared memory, the device has "
                f"{device.shared_kib} KiB: take fewer stages or a smaller block_n"
            )
    return device


def _strict(kind: type, fields: Any, where: str) -> Any:
    types = {f.name: f.type for f in dataclasses.fields(kind)}
    if not isinstance(fields, dict) or set(fields) != set(types):
        odd = set(types).symmetric_difference(fields) if isinstance(fields, dict) else types
        raise KernelError(f"{where}: missing or unknown: {', '.join(sorted(odd))}")
    kinds = {"int": int, "float": (int, float), "str": str, "bool": bool}
    for name, value in fields.items():
        wanted = kinds.get(types[name])
        if wanted and (
            not isinstance(value, wanted) or isinstance(value, bool) != (wanted is bool)
        ):
            raise KernelError(f"{where}: {name} must be {types[name]} (got {value!r})")
        if wanted not in (None, str, bool) and value <= 0:
            raise KernelError(f"{where}: {name} must be positive (got {value!r})")
    return kind(**fields)


@functools.cache
def devices() -> tuple[Device, ...]:
    """All kinds of GPU for which configurations are shipped."""
    folder = Path(str(importlib.resources.files("ai_jax.kernels.tuned")))
    return tuple(read_device(p.read_text(), p.name) for p in sorted(folder.glob("*.json")))


def device_for(name: str, compute_capability: int) -> Device:
    """The entry for a driver's name; else the nearest one of no higher compute capability.

    Raises KernelError for GPUs older than sm_80.
    """
    for device in devices():
        if device.match in name and device.compute_capability == compute_capability:
            return device
    older = [d for d in devices() if d.compute_capability <= compute_capability]
    if not older:
        raise KernelError(
            f"the Triton kernel needs a GPU of compute capability 8.0 or newer ({name} has "
            f'{compute_capability / 10}): take backend="xla"'
        )
    # Of equals the one with least shared memory: its configurations fit the others.
    nearest = max(older, key=lambda d: (d.compute_capability, -d.shared_kib))
    # sm_86 and sm_89 have 99 KiB of shared memory, like sm_120, whose blocks are the smaller.
    if compute_capability in (86, 89):
        nearest = next(d for d in devices() if d.compute_capability == 120)
    return dataclasses.replace(
        nearest, device=name, match=name, compute_capability=compute_capability
    )
