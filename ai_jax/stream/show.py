"""What a person sees of a stream: the timeline in the terminal and the picture."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from ai_jax.stream.listen import ChunkResult

ROW_CHUNKS = 50  # chunks in one row of the timeline: 20 s of 400 ms chunks


def record(result: ChunkResult) -> dict[str, object]:
    """The JSON object of one chunk; ``t`` is in seconds."""
    fields = {
        "chunk": result.chunk,
        "t": result.t,
        "decision": result.decision,
        "p_response": round(result.p_response, 4),
        "text": result.text,
    }
    return fields if result.emotion is None else fields | {"emotion": result.emotion}


def pace(blocks: Iterable[np.ndarray], *, rate: int = 16000) -> Iterator[np.ndarray]:
    """Pass each block on when its last sample would have been heard, and no sooner."""
    start, heard = time.monotonic(), 0
    for block in blocks:
        heard += len(block)
        time.sleep(max(0.0, start + heard / rate - time.monotonic()))
        yield block


class Timeline:
    """Prints a stream as it goes by: a mark per silent chunk, a line per reply."""

    def __init__(
        self, chunk_seconds: float, *, total_s: float | None = None, console: Console | None = None
    ):
        self._console = console or Console(highlight=False)
        self._chunk_seconds = chunk_seconds
        self._total_s = total_s
        self._marks = ""
        self._row_start = 0.0
        self._replies = self._chunks = 0
        self._started = time.monotonic()
        self._live = Live(
            console=self._console, refresh_per_second=8, transient=True, auto_refresh=False
        )
        if self._console.is_terminal:
            self._live.start()

    def add(self, result: ChunkResult) -> None:
        if not self._marks:
            self._row_start = result.t - self._chunk_seconds
        self._chunks += 1
        if result.decision == "silent":
            self._marks += "·"
        else:
            self._replies += 1
            self._flush("●")
            line = Text(f"{clock(result.t)}  ", style="bold")
            if result.emotion:
                line.append(f"[{result.emotion}] ", style="magenta")
            line.append(result.text or "(an empty reply)", style="bold green")
            line.append(f"   P {result.p_response:.2f}", style="dim")
            self._console.print(line)
        if len(self._marks) >= ROW_CHUNKS:
            self._flush()
        if self._live.is_started:
            self._live.update(self._status(result.t), refresh=True)

    def close(self) -> None:
        self._flush()
        if self._live.is_started:
            self._live.stop()
        heard = self._chunks * self._chunk_seconds
        took = time.monotonic() - self._started
        replies = "1 reply" if self._replies == 1 else f"{self._replies} replies"
        self._console.print(
            f"heard {heard:.1f} s in {took:.1f} s: {replies}, silent in "
            f"{self._chunks - self._replies} of {self._chunks} chunks of "
            f"{self._chunk_seconds * 1000:.0f} ms",
            style="dim",
        )

    def _flush(self, end: str = "") -> None:
        if self._marks or end:
            self._console.print(self._row(self._marks + end))
        self._marks = ""

    def _row(self, marks: str) -> Text:
        row = Text(f"{clock(self._row_start)}  ", style="dim")
        row.append(marks, style="cyan")
        return row

    def _status(self, t: float) -> Text:
        row = self._row(self._marks) if self._marks else Text()
        total = f" / {clock(self._total_s)}" if self._total_s else ""
        speed = t / max(time.monotonic() - self._started, 1e-9)
        row.append(f"\nlistening {clock(t)}{total}   {speed:.1f}x real time", style="dim")
        return row


def clock(seconds: float) -> str:
    """``m:ss.t``, e.g. 75.2 -> 1:15.2."""
    tenths = round(seconds * 10)
    return f"{tenths // 600}:{tenths // 10 % 60:02d}.{tenths % 10}"


def draw(
    results: Sequence[ChunkResult],
    path: Path,
    *,
    threshold: float,
    title: str,
    waveform: np.ndarray | None = None,
    rate: int = 16000,
    spans: Sequence[tuple[float, float, str]] = (),
) -> None:
    """PNG: the waveform (its peak per chunk if not given), P(response), replies as labels.

    spans: (start, end, name) of what is known to sound, in seconds, shaded under the waveform.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    t = np.array([r.t for r in results])
    p = np.array([r.p_response for r in results])
    step = t[0]
    end = t[-1]
    fig, (top, bottom) = plt.subplots(
        2, 1, figsize=(min(30, max(11, end / 3)), 5.6), sharex=True, height_ratios=[1.1, 1]
    )
    if waveform is None:
        peak = np.array([r.peak for r in results])
        top.bar(t - step, 2 * peak, step, -peak, align="edge", color="#4c72b0")
    else:
        top.plot(np.arange(len(waveform)) / rate, waveform, lw=0.3, color="#4c72b0")
    loudest = max(max(r.peak for r in results), 1e-3)
    for start, stop, name in spans:
        top.axvspan(start, stop, alpha=0.12, color="#8172b3", lw=0)
        top.text(start, -1.05 * loudest, name.replace("_", " "), fontsize=7, color="#5a4a8a")
    top.set(ylim=(-1.1 * loudest, 2.9 * loudest), ylabel="amplitude", title=title, xlim=(0, end))
    top.set_yticks([-loudest, 0, loudest], [f"{-loudest:.2f}", "0", f"{loudest:.2f}"])
    bottom.step(t, p, where="pre", color="#444444", lw=1)
    bottom.fill_between(t, p, step="pre", alpha=0.2, color="#444444")
    bottom.axhline(threshold, color="#c44e52", lw=0.8, ls="--", label=f"threshold {threshold:.2f}")
    bottom.legend(loc="upper right", fontsize=8)
    bottom.set(ylim=(0, 1.05), ylabel="P(response)", xlabel="seconds")
    replies = [r for r in results if r.decision == "response"]
    for i, r in enumerate(replies):
        for axis in (top, bottom):
            axis.axvline(r.t, color="#55a868", lw=1)
        room = 0.45 * end < r.t
        words = "".join(c if c.isprintable() else " " for c in r.text)
        words = words if len(words) <= 60 else words[:57] + "..."
        height = (2.65 - 0.28 * (i % 6)) * loudest
        top.text(
            r.t, height, f" {words} ", fontsize=8, ha="right" if room else "left", va="center",
            bbox={"facecolor": "white", "edgecolor": "#55a868", "pad": 1.5, "lw": 0.6},
        )  # fmt: skip
    fig.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.part")
    fig.savefig(partial, dpi=130, format="png")
    plt.close(fig)
    os.replace(partial, path)
