"""Are two models on disk the same? Tensor by tensor, and by running both on the same sound."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from ai_jax.config import to_dict
from ai_jax.convert import hf, mapping
from ai_jax.convert.behaviour import Behaviour, material, run_both
from ai_jax.convert.compare import GroupDiff, compare
from ai_jax.convert.inspect import opened
from ai_jax.convert.runners import Implementation, has_transformers
from ai_jax.convert.source import Source
from ai_jax.errors import UserError

LOGITS_TOLERANCE = 1e-5  # of float32, relative to the largest logit
Verdict = Literal["same", "within tolerance", "different"]
# What of the config changes what a model computes; the rest is names and limits of serving.
_SHAPING = ("audio.", "text.", "mel.", "stream.format.")


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the two models: where it is and in which form."""

    path: str
    kind: str
    step: int | None


@dataclasses.dataclass(frozen=True)
class Report:
    """What ``verify`` finds; ``to_json`` makes plain JSON of it.

    groups: see ``GroupDiff``. config: key -> values of A and B, where they differ. behaviour: None
    if the models were not run, for the reason ``not_run``. reasons: why the verdict is what it is,
    empty for "same". notes: what one should know but does not count.
    """

    a: Side
    b: Side
    groups: tuple[GroupDiff, ...]
    config: Mapping[str, tuple[Any, Any]]
    behaviour: Behaviour | None
    not_run: str | None
    tolerance: float | None
    verdict: Verdict
    reasons: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        return int(self.verdict == "different")

    def to_json(self) -> dict[str, Any]:
        """Numbers that JSON lacks become the strings "inf" and "nan"."""
        return _plain(dataclasses.asdict(self))


def verify(
    a: str | Path | Source,
    b: str | Path | Source,
    *,
    run: bool = True,
    implementation: Literal["auto", "ours", "transformers"] = "auto",
    audio: str | Path | None = None,
    chunks: int = 50,
    tolerance: float | None = None,
    seed: int = 0,
) -> Report:
    """Compare two models: Hugging Face folders, checkpoints, training runs or release folders.

    They are the same if every tensor has the same bits, none is missing but those left out on
    purpose, and their logits agree to 1e-5 of the largest one. Each runs in float32, on noise and
    on a recording with given tokens, then greedily on ``chunks`` chunks of the recording.

    run: False compares weights and configs alone. implementation: who runs Hugging Face folders;
    "auto" lets transformers, if it is installed, run the first of them, so that our code is
    compared with an independent one. audio: the recording; None takes spoken words of the package.
    tolerance: accept tensors that differ by so much of their largest value, and logits likewise.
    Raises UserError if one of the models or ``audio`` cannot be read, or ``implementation`` cannot
    be had.
    """
    if tolerance is not None and not 0 <= tolerance < 1:
        raise UserError(f"the tolerance must lie between 0 and 1 (got {tolerance})")
    a, b = opened(a), opened(b)
    implementations = _implementations(a, b, implementation)
    config = _config_differences(a, b)
    not_run = _why_not(config) if run else "not asked for"
    # Before the weights are read, which takes a while: bad input is an error at once.
    given = material(a.config, audio, chunks, seed) if not_run is None else None
    groups = compare(a, b)
    behaviour = None if given is None else run_both(a, b, implementations, given)
    reasons, notes = [], []
    _judge_config(config, reasons, notes)
    _judge_missing(groups, a, b, reasons, notes)
    _judge_tensors(groups, tolerance, reasons, notes)
    if behaviour is not None:
        _judge_behaviour(behaviour, tolerance, reasons, notes)
    if reasons:
        verdict = "different"
    else:
        verdict = "same" if all(g.equal == g.tensors for g in groups) else "within tolerance"
    return Report(
        a=_side(a),
        b=_side(b),
        groups=groups,
        config=config,
        behaviour=behaviour,
        not_run=not_run,
        tolerance=tolerance,
        verdict=verdict,
        reasons=tuple(reasons),
        notes=tuple(notes),
    )


def _side(source: Source) -> Side:
    return Side(str(source.path), source.kind, source.step)


def _implementations(a: Source, b: Source, wanted: str) -> tuple[Implementation, Implementation]:
    def can(source: Source) -> bool:
        # The rounding of positions is not transformers'.
        return source.kind == "hf" and not source.config.text.fp16_positions

    if wanted == "transformers":
        if not has_transformers():
            raise UserError("transformers is not installed: pip install 'ai-jax[torch]'")
        if not can(a) and not can(b):
            raise UserError(
                "transformers runs Hugging Face folders only, and neither model is one; "
                "convert one of them with: ai-jax convert to-hf"
            )
        return tuple("transformers" if can(s) else "ours" for s in (a, b))
    if wanted == "auto" and has_transformers():
        if can(a):
            return "transformers", "ours"
        if can(b):
            return "ours", "transformers"
    return "ours", "ours"


# The configs.


def _config_differences(a: Source, b: Source) -> dict[str, tuple[Any, Any]]:
    x, y = (dict(_flat(to_dict(source.config))) for source in (a, b))
    keys = [key for key in (*x, *(y.keys() - x.keys())) if key != "name"]
    return {key: (x.get(key), y.get(key)) for key in keys if x.get(key) != y.get(key)}


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _why_not(config: Mapping[str, Any]) -> str | None:
    """Why the two cannot read the same stream; None if they can."""
    for key in (
        "text.vocab_size",
        *(k for k in config if k.startswith(("mel.", "stream.format."))),
    ):
        if key in config:
            return f"{key} differs, so they cannot read the same stream"
    for key in ("audio.n_window", "audio.num_mel_bins"):
        if key in config:
            return f"{key} differs, so they cannot hear the same chunks"
    return None


def _judge_config(config: Mapping[str, tuple[Any, Any]], reasons: list, notes: list) -> None:
    for key, (x, y) in config.items():
        where = reasons if key.startswith(_SHAPING) else notes
        where.append(f"the configs differ: {key} is {x} in A and {y} in B")


# The tensors.


def _judge_missing(
    groups: tuple[GroupDiff, ...], a: Source, b: Source, reasons: list, notes: list
) -> None:
    for g in groups:
        sides = (("A", a, "B", b, g.only_a), ("B", b, "A", a, g.only_b))
        for has, owner, lacks, other, names in sides:
            stand_ins = [name for name in names if _is_stand_in(name, owner)]
            left_out = [name for name in names if _left_out(name, other)]
            missing = [name for name in names if name not in {*stand_ins, *left_out}]
            if stand_ins:
                notes.append(f"{g.group}: {has} has stand-ins, which transformers asks for")
            elif left_out:
                notes.append(f"{g.group}: {lacks} leaves out {_listed(left_out)} on purpose")
            if missing:
                reasons.append(f"{g.group}: only {has} has {_listed(missing)}")
        if g.reshaped:
            reasons.append(f"{g.group}: of another shape in A than in B: {_listed(g.reshaped)}")


def _left_out(name: str, source: Source) -> bool:
    """Whether ``source`` notes to lack the tensor, or is a training run, which saves what it runs.

    It cannot be a tensor that the model runs: without those, no model can be opened.
    """
    parts = source.conversion.get("skipped", ())
    skipped = any(name.startswith(mapping.PARTS[part]) for part in parts)
    return skipped or source.step is not None


def _is_stand_in(name: str, source: Source) -> bool:
    """Whether a tensor is but what transformers asks for where there is no vision."""
    return source.specs[name].shape == hf.NO_VISION_SHAPES.get(name)


def _listed(names: tuple[str, ...] | list[str]) -> str:
    return f"'{names[0]}'" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _judge_tensors(
    groups: tuple[GroupDiff, ...], tolerance: float | None, reasons: list, notes: list
) -> None:
    for g in groups:
        count = g.tensors - g.equal
        if not count:
            continue
        dtypes = "".join(f", {change} in {n}" for change, n in g.dtypes.items())
        text = (
            f"{g.group}: {count} of {g.tensors} tensors differ in bits{dtypes}; "
            f"most of all '{g.worst}', by {g.max_rel_diff:.2g} of its largest value"
        )
        accepted = tolerance is not None and g.max_rel_diff <= tolerance
        (notes if accepted else reasons).append(text)


# The run.


def _judge_behaviour(ran: Behaviour, tolerance: float | None, reasons: list, notes: list) -> None:
    limit = LOGITS_TOLERANCE if tolerance is None else tolerance
    if ran.a == ran.b == "ours":
        notes.append("our implementation ran both: this compares the weights, not the code")
    for clip in ran.clips:
        if clip.relative > limit:
            reasons.append(
                f"on {clip.clip}, the logits differ by {clip.relative:.2g} of the largest one "
                f"(accepted: {limit:g})"
            )
    if ran.greedy.chunk is not None:
        # Two logits that differ by at most the limit can change the order of two this close.
        tie = ran.greedy.margin <= 2 * limit * ran.scale
        text = f"greedy decoding differs from chunk {ran.greedy.chunk} on"
        if tie:
            notes.append(f"{text}, where the two likeliest tokens tie")
        else:
            reasons.append(text)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else f"{value}"
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


# Rendering.


def table(report: Report) -> Any:
    """The report for a terminal: a rich renderable."""
    from rich.console import Group as Lines
    from rich.markup import escape
    from rich.table import Table

    sides = [f"{name}: {s.path} ({s.kind})" for name, s in (("A", report.a), ("B", report.b))]
    weights = Table()
    weights.add_column("part")
    weights.add_column("dtypes that differ")
    for column in ("tensors", "MB", "equal bits", "max abs diff", "relative", "only A", "only B"):
        weights.add_column(column, justify="right")
    for g in report.groups:
        weights.add_row(
            g.group,
            ", ".join(g.dtypes),
            f"{g.tensors:,}",
            f"{g.bytes / 1e6:,.1f}",
            f"{g.equal:,}",
            f"{g.max_abs_diff:.3g}",
            f"{g.max_rel_diff:.2g}",
            *(f"{len(names):,}" if names else "" for names in (g.only_a, g.only_b)),
        )
    color = "red" if report.exit_code else "green"
    return Lines(
        *map(escape, sides),
        weights,
        *_behaviour_lines(report),
        *(escape(f"note: {note}") for note in report.notes),
        *(escape(f"differs: {reason}") for reason in report.reasons),
        f"[bold {color}]{report.verdict}[/]",
    )


def _behaviour_lines(report: Report) -> list[Any]:
    from rich.table import Table

    ran = report.behaviour
    if ran is None:
        return [f"not run: {report.not_run}"]
    logits = Table()
    logits.add_column("logits on")
    for column in ("positions", "max abs diff", "relative", "mean KL", "top-1 agrees"):
        logits.add_column(column, justify="right")
    for clip in ran.clips:
        logits.add_row(
            clip.clip,
            f"{clip.positions:,}",
            f"{clip.max_abs_diff:.3g}",
            f"{clip.relative:.2g}",
            f"{clip.kl:.2g}",
            f"{clip.top1:.1%}",
        )
    g = ran.greedy
    first = "" if g.chunk is None else f"; the first difference is in chunk {g.chunk}"
    return [
        logits,
        f"A ran in {ran.a} ({ran.seconds_a:g} s), B in {ran.b} ({ran.seconds_b:g} s), in float32",
        f"greedy over {g.chunks} chunks: {g.equal} of {len(g.a)} tokens equal{first}",
    ]
