"""Two models' tensors, compared bit by bit in bounded memory."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from ai_jax.convert.files import progress
from ai_jax.convert.groups import GROUPS, group_of
from ai_jax.convert.mapped import let_go
from ai_jax.convert.source import Source

Tensors = Iterator[tuple[str, np.ndarray]]

_BLOCK = 1 << 18  # elements; blocks of a tensor fit the processor's cache


@dataclasses.dataclass(frozen=True)
class GroupDiff:
    """One part of two models, A and B.

    tensors, bytes: those in both, in A's dtype. equal: how many have the same dtype and bits.
    max_abs_diff: largest ``|a - b|``; infinite where only one is NaN. max_rel_diff: largest
    ``|a - b|`` of a tensor over its largest ``|a|``. worst: the tensor with that one. dtypes:
    changes, as in ``"float32 -> bfloat16"``, and of how many tensors. only_a, only_b: tensors that
    the other one lacks. reshaped: tensors of different shapes.
    """

    group: str
    tensors: int = 0
    bytes: int = 0
    equal: int = 0
    max_abs_diff: float = 0.0
    max_rel_diff: float = 0.0
    worst: str | None = None
    dtypes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Difference:
    """Of two tensors of one shape: see ``GroupDiff``."""

    equal: bool
    absolute: float = 0.0
    relative: float = 0.0


def compare(a: Source, b: Source) -> tuple[GroupDiff, ...]:
    """Compare every tensor that both have, and list those that only one has, part by part.

    Holds a few hundred megabytes of each model at most, and a bar shows the progress.
    """
    both = [name for name in a.specs if name in b.specs]
    same_shape = [name for name in both if a.specs[name].shape == b.specs[name].shape]
    differences: dict[str, Difference] = {}
    size = sum(a.specs[name].nbytes + b.specs[name].nbytes for name in same_shape)
    with progress("Comparing weights", size) as advance:
        from_a, from_b = iter(a.fetch(same_shape)), iter(b.fetch(same_shape))
        for name in same_shape:
            differences[name] = _compare_next(name, from_a, from_b)
            advance(a.specs[name].nbytes + b.specs[name].nbytes)
    parts: dict[str, list[str]] = collections.defaultdict(list)
    for name in (*a.specs, *(name for name in b.specs if name not in a.specs)):
        parts[group_of(name)].append(name)
    ordered = sorted(parts.items(), key=lambda part: GROUPS.index(part[0]))
    return tuple(_sum_up(group, names, a, b, differences) for group, names in ordered)


def _compare_next(name: str, from_a: Tensors, from_b: Tensors) -> Difference:
    """Compare the next tensor of each, and let go of both."""
    (first, x), (second, y) = next(from_a), next(from_b)
    if not first == second == name:
        raise RuntimeError(f"asked for {name}, got {first} and {second}")
    result = difference(x, y)
    let_go(x)
    let_go(y)
    return result


def _sum_up(
    group: str, names: list[str], a: Source, b: Source, differences: Mapping[str, Difference]
) -> GroupDiff:
    compared = [name for name in names if name in differences]
    dtypes = collections.Counter(
        f"{a.specs[name].dtype.name} -> {b.specs[name].dtype.name}"
        for name in compared
        if a.specs[name].dtype != b.specs[name].dtype
    )
    unequal = [name for name in compared if not differences[name].equal]
    return GroupDiff(
        group=group,
        tensors=len(compared),
        bytes=sum(a.specs[name].nbytes for name in compared),
        equal=len(compared) - len(unequal),
        max_abs_diff=max((differences[name].absolute for name in unequal), default=0.0),
        max_rel_diff=max((differences[name].relative for name in unequal), default=0.0),
        worst=max(unequal, key=lambda name: differences[name].relative, default=None),
        dtypes=dict(dtypes),
        only_a=tuple(name for name in names if name not in b.specs),
        only_b=tuple(name for name in names if name not in a.specs),
        reshaped=tuple(
            name
            for name in names
            if name in a.specs and name in b.specs and name not in differences
        ),
    )


def difference(x: np.ndarray, y: np.ndarray) -> Difference:
    """Compare two tensors of one shape and any dtypes, in blocks.

    Equal bits are equal, NaN included. Of different bits, two NaNs, two infinities of one sign and
    two zeros differ by nothing, a NaN and a number by infinity.
    """
    x, y = x.reshape(-1), y.reshape(-1)
    comparable = x.dtype == y.dtype
    equal, absolute, scale = True, 0.0, 0.0
    for start in range(0, x.size, _BLOCK):
        i, j = x[start : start + _BLOCK], y[start : start + _BLOCK]
        if comparable and np.array_equal(i.view(np.uint8), j.view(np.uint8)):
            continue
        equal = False
        absolute = max(absolute, _largest_difference(i, j))
    if equal and comparable:
        return Difference(True)
    for start in range(0, x.size, _BLOCK):
        scale = max(scale, _largest(x[start : start + _BLOCK]))
    relative = 0.0 if absolute == 0 else absolute / scale if scale else np.inf
    return Difference(False, absolute, float(relative))


def _largest_difference(x: np.ndarray, y: np.ndarray) -> float:
    # An int64 beyond 2^53 is rounded here; no weight is one.
    x, y = x.astype(np.float64), y.astype(np.float64)
    with np.errstate(invalid="ignore"):
        gap = np.abs(x - y)
    gap[(x == y) | (np.isnan(x) & np.isnan(y))] = 0
    gap[np.isnan(gap)] = np.inf
    return float(gap.max())


def _largest(x: np.ndarray) -> float:
    """The largest finite magnitude, or 0."""
    x = np.abs(x.astype(np.float64))
    return float(x[np.isfinite(x)].max(initial=0.0))
