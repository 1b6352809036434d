"""From sums to the numbers that people read, and the file that keeps them."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import numpy as np


def summarize(sums: Mapping[str, float], lambda_stream: float = 1.0) -> dict[str, float]:
    """Metrics of any number of batches whose sums were added up.

    loss: the dual loss (without weights of single classes and without auxiliary terms).
    loss_stream, loss_lm: mean -log P at decisions, at text tokens. trigger_accuracy: share of
    decisions where the likelier of the two control tokens is right. response_precision,
    response_recall: of the decisions to respond. text_accuracy: share of text tokens that are the
    most likely of the vocabulary. A ratio without a denominator is NaN.
    """
    s = {k: float(v) for k, v in sums.items()}
    tp, fp, fn = s["true_positives"], s["false_positives"], s["false_negatives"]
    total = s["lm_nll"] + lambda_stream * s["stream_nll"]
    metrics = {
        "loss": _ratio(total, s["lm_n"] + s["stream_n"]),
        "loss_stream": _ratio(s["stream_nll"], s["stream_n"]),
        "loss_lm": _ratio(s["lm_nll"], s["lm_n"]),
        "trigger_accuracy": 1.0 - _ratio(fp + fn, s["stream_n"]),
        "response_precision": _ratio(tp, tp + fp),
        "response_recall": _ratio(tp, tp + fn),
        "text_accuracy": _ratio(s["lm_right"], s["lm_n"]),
    }
    if "event_nll" in s:
        metrics["loss_event"] = _ratio(s["event_nll"], s["event_n"])
    return metrics


def add(a: Mapping[str, float] | None, b: Mapping[str, jax.Array]) -> dict[str, float]:
    """``a + b`` on the host in float64, so that long sums lose nothing. Waits for ``b``."""
    b = {k: float(v) for k, v in jax.device_get(dict(b)).items()}
    return b if a is None else {k: a[k] + v for k, v in b.items()}


class Meter:
    """Sums and audio seconds since the last report."""

    def __init__(self, lambda_stream: float):
        self._lambda = lambda_stream
        self._restart()

    def _restart(self) -> None:
        self._sums: dict[str, float] | None = None
        self._audio, self._steps = 0.0, 0
        self._start = time.perf_counter()

    def update(self, sums: Mapping[str, jax.Array], audio_seconds: float) -> None:
        self._sums = add(self._sums, sums)
        self._audio += audio_seconds
        self._steps += 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside does not count as time of training."""
        began = time.perf_counter()
        yield
        self._start += time.perf_counter() - began

    def report(self) -> dict[str, float]:
        """Metrics since the last report, and ``audio_per_s``: seconds of audio per second."""
        assert self._sums is not None, "report() before the first update()"
        metrics = summarize(self._sums, self._lambda)
        metrics["grad_norm"] = self._sums["grad_norm"] / self._steps
        metrics["audio_per_s"] = self._audio / (time.perf_counter() - self._start)
        self._restart()
        return metrics


class MetricsFile:
    """``metrics.jsonl``, one JSON object a line.

    Opening it for a run that goes on at ``step`` drops what was logged later than that.
    """

    def __init__(self, path: Path, step: int):
        self._path = path
        kept = []
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:  # the line that a kill cut off
                    continue
                if row["step"] <= step:
                    kept.append(line + "\n")
        path.write_text("".join(kept), encoding="utf-8")

    def write(self, row: Mapping[str, object]) -> None:
        clean = {
            k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in row.items()
        }
        with self._path.open("a", encoding="utf-8") as f:
            f.write(json.dumps(clean) + "\n")


def _ratio(a: float, b: float) -> float:
    return a / b if b else float("nan")
