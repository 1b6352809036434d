"""What is in a model on disk: sizes, dtypes, parts, stream format, origin, fingerprint."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import math
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ai_jax.config import to_dict
from ai_jax.convert.files import progress
from ai_jax.convert.groups import GROUPS, group_of
from ai_jax.convert.mapped import let_go
from ai_jax.convert.open import open_source
from ai_jax.convert.shards import Spec
from ai_jax.convert.source import Source


@dataclasses.dataclass(frozen=True)
class Group:
    """One part of the model. runs: it takes part in listening; otherwise it only travels along."""

    name: str
    tensors: int
    parameters: int
    bytes: int
    dtypes: tuple[str, ...]
    runs: bool


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """SHA-256 over names, shapes, dtypes and bytes of tensors, in hexadecimal.

    model: of the tensors that the model runs, and so the same in whatever form or shards it is
    stored. carried: of those that only travel along; None if there are none.
    """

    model: str
    carried: str | None


@dataclasses.dataclass(frozen=True)
class Report:
    """What ``inspect`` finds; ``to_json`` makes plain JSON of it.

    parameters, bytes: of all tensors; ``parameters_run`` of those that the model runs. sizes: the
    architecture. stream: format, control ids and limits of a session. files: what lies beside the
    weights. conversion: of a converted checkpoint, how it was made: parts skipped, dtype cast to.
    fingerprint: None unless asked for.
    """

    path: str
    kind: str
    name: str
    step: int | None
    parameters: int
    parameters_run: int
    bytes: int
    dtypes: Mapping[str, int]
    groups: tuple[Group, ...]
    sizes: Mapping[str, Any]
    stream: Mapping[str, Any]
    chunk_seconds: float
    max_len: int
    tokenizer: bool
    files: tuple[str, ...]
    provenance: Mapping[str, Any]
    conversion: Mapping[str, Any]
    fingerprint: Fingerprint | None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def inspect(source: str | Path | Source, *, fingerprint: bool = False) -> Report:
    """Describe a model: a Hugging Face folder, checkpoint, training run or release folder.

    Reads no weights, unless ``fingerprint`` asks for one. Raises UserError if there is no model.
    """
    source = opened(source)
    config, specs = source.config, source.specs
    sizes = to_dict(config)
    return Report(
        path=str(source.path),
        kind=source.kind,
        name=config.name,
        step=source.step,
        parameters=_parameters(specs.values()),
        parameters_run=_parameters(specs[name] for name in source.params),
        bytes=sum(spec.nbytes for spec in specs.values()),
        dtypes=dict(collections.Counter(spec.dtype.name for spec in specs.values()).most_common()),
        groups=_groups(source),
        sizes={part: sizes[part] for part in ("audio", "text")},
        stream=sizes["stream"],
        chunk_seconds=config.chunk_seconds,
        max_len=config.stream.max_len,
        tokenizer=source.tokenizer is not None,
        files=tuple(sorted(source.files)),
        provenance=dict(source.provenance),
        conversion=dict(source.conversion),
        fingerprint=fingerprint_of(source) if fingerprint else None,
    )


def opened(source: str | Path | Source) -> Source:
    """The model at a path, or the one given."""
    return source if isinstance(source, Source) else open_source(source)


def _parameters(specs: Iterable[Spec]) -> int:
    return sum(math.prod(spec.shape) for spec in specs)


def _groups(source: Source) -> tuple[Group, ...]:
    names = collections.defaultdict(list)
    runs = set(source.params)
    for name in source.specs:
        names[group_of(name), name in runs].append(name)
    groups = []
    for (group, running), members in names.items():
        specs = [source.specs[name] for name in members]
        groups.append(
            Group(
                name=group,
                tensors=len(specs),
                parameters=_parameters(specs),
                bytes=sum(spec.nbytes for spec in specs),
                dtypes=tuple(sorted({spec.dtype.name for spec in specs})),
                runs=running,
            )
        )
    return tuple(sorted(groups, key=lambda g: (not g.runs, GROUPS.index(g.name))))


# Fingerprint.


def fingerprint_of(source: Source) -> Fingerprint:
    """Hash every tensor of ``source``; memory stays at a few tensors, two are hashed at a time."""
    names = list(source.specs)
    digests: dict[str, bytes] = {}
    waiting: collections.deque[tuple[str, Future[bytes]]] = collections.deque()
    size = sum(spec.nbytes for spec in source.specs.values())

    def take() -> None:
        name, digest = waiting.popleft()
        digests[name] = digest.result()
        advance(source.specs[name].nbytes)

    with (
        progress(f"Hashing {source.path.name}", size) as advance,
        ThreadPoolExecutor(2) as pool,
    ):
        for name, tensor in source.fetch(names):
            if len(waiting) == 2:
                take()
            waiting.append((name, pool.submit(_digest, tensor)))
            del tensor
        while waiting:
            take()
    carried = source.carried
    return Fingerprint(
        model=_combine(source, source.params, digests),
        carried=_combine(source, carried, digests) if carried else None,
    )


def _digest(tensor: np.ndarray) -> bytes:
    # Processors compute SHA-256 in hardware: it is faster than BLAKE2 there.
    digest = hashlib.sha256(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)).digest()
    let_go(tensor)
    return digest


def _combine(source: Source, names: Iterable[str], digests: Mapping[str, bytes]) -> str:
    """One digest for tensors in the order of their names, wherever they were stored."""
    total = hashlib.sha256()
    for name in sorted(names):
        spec = source.specs[name]
        total.update(f"{name} {spec.dtype.name} {list(spec.shape)}\n".encode() + digests[name])
    return total.hexdigest()


# Rendering.


def table(report: Report) -> Any:
    """The report for a terminal: a rich renderable."""
    from rich.console import Group as Lines
    from rich.markup import escape
    from rich.table import Table

    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    for key, value in _facts(report):
        facts.add_row(key, escape(value))
    groups = Table(title_justify="left")
    for column in ("part", "dtype"):
        groups.add_column(column)
    for column in ("tensors", "parameters", "MB"):
        groups.add_column(column, justify="right")
    groups.add_column("runs")
    for g in report.groups:
        groups.add_row(
            g.name,
            ", ".join(g.dtypes),
            f"{g.tensors:,}",
            f"{g.parameters:,}",
            f"{g.bytes / 1e6:,.1f}",
            "yes" if g.runs else "no",
        )
    return Lines(facts, groups)


def _facts(r: Report) -> list[tuple[str, str]]:
    kinds = {"hf": "Hugging Face folder", "orbax": "Orbax checkpoint", "release": "release folder"}
    stream, text, audio = r.stream["format"], r.sizes["text"], r.sizes["audio"]
    controls = ("silent", "response", "eos", "audio", "pad")
    facts = [
        ("path", r.path),
        (
            "kind",
            kinds.get(r.kind, r.kind)
            + (f", step {r.step:,} of a training run" if r.step is not None else ""),
        ),
        ("name", r.name),
        (
            "parameters",
            f"{_short(r.parameters_run)} run"
            + (f", {_short(r.parameters)} in all" if r.parameters != r.parameters_run else ""),
        ),
        (
            "weights",
            f"{r.bytes / 1e6:,.1f} MB; "
            + ", ".join(f"{count:,} {dtype}" for dtype, count in r.dtypes.items()),
        ),
        (
            "audio tower",
            f"{audio['encoder_layers']} layers of {audio['d_model']}, {audio['num_mel_bins']} mels",
        ),
        (
            "decoder",
            f"{text['num_hidden_layers']} layers of {text['hidden_size']}, "
            f"{text['num_attention_heads']}/{text['num_key_value_heads']} heads, "
            f"vocabulary {text['vocab_size']:,}",
        ),
        (
            "stream",
            f"{stream['name']} format; " + ", ".join(f"{key} {stream[key]}" for key in controls),
        ),
        ("listens", f"{r.chunk_seconds:g} s at a time, cache of {r.max_len:,} tokens"),
        ("tokenizer", "yes" if r.tokenizer else "none: copy a tokenizer.json there to listen"),
        ("files", ", ".join(r.files) or "none"),
        *((f"origin: {key}", _plain(value)) for key, value in r.provenance.items()),
        *((f"conversion: {key}", _plain(value)) for key, value in r.conversion.items() if value),
    ]
    if r.fingerprint is None:
        return [*facts, ("fingerprint", "not computed (--fingerprint reads all weights)")]
    facts.append(("fingerprint", r.fingerprint.model))
    if r.fingerprint.carried:
        facts.append(("of what is carried", r.fingerprint.carried))
    return facts


def _short(count: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value))
    return str(value)
