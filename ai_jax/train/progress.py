"""The line that people watch while a model trains."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class TrainProgress:
    """A rich progress line on a terminal; elsewhere one plain line per report, on stderr."""

    def __init__(self, total: int):
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[line]}"),
            console=self._console,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("training", total=total, line="")

    def __enter__(self) -> TrainProgress:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """A line of its own."""
        self._console.print(text, markup=False)

    def step(self, done: int, stage: str) -> None:
        self._bar.update(self._task, completed=done, description=stage)

    def report(self, done: int, stage: str, metrics: Mapping[str, float], eta_s: float) -> None:
        line = describe(metrics) + f"  ETA {_clock(eta_s)}"
        self._bar.update(self._task, completed=done, description=stage, line=line)
        if self._bar.disable:
            self.say(f"{stage} step {done}: {line}")


def describe(metrics: Mapping[str, float]) -> str:
    """Metrics in a line: loss, decisions, precision and recall of responses, text, speed."""
    parts = [
        f"loss {metrics['loss']:.3f}",
        f"trigger {metrics['trigger_accuracy']:.3f}",
        f"response P {metrics['response_precision']:.2f} R {metrics['response_recall']:.2f}",
        f"text {metrics['text_accuracy']:.3f}",
    ]
    if "audio_per_s" in metrics:
        parts.append(f"{metrics['audio_per_s']:.0f} s audio/s")
    return "  ".join(parts)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
