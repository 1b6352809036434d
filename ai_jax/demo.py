"""The demonstration: a recording composed on the spot, heard by the model that ships."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from ai_jax.audio import io
from ai_jax.data import nano
from ai_jax.data.compose import ComposeConfig, Stream, compose
from ai_jax.errors import UserError
from ai_jax.stream import show
from ai_jax.stream.engine import Engine
from ai_jax.stream.listen import ChunkResult, listen

NEAR_CHUNKS = 2  # a reply this close to its due chunk answers it


def recording(seed: int) -> Stream:
    """Half a minute of synthesised sounds and a few spoken words that training did not use."""
    rng = np.random.Generator(np.random.PCG64(seed))
    folder = resources.files("ai_jax.assets.demo")
    words = sorted(p.name for p in folder.iterdir() if p.name.endswith(".flac"))
    spoken = []
    for name in rng.permutation(words)[:4]:
        with resources.as_file(folder / str(name)) as path:
            spoken.append((path.stem, io.read(path)))
    return compose(*nano.demo_plan(rng, spoken), rng, ComposeConfig())


def run(engine: Engine, out: Path, seed: int, console: Console | None = None) -> None:
    """Compose, listen, compare; writes demo.flac, demo.json and demo.png into ``out``."""
    console = console or Console(highlight=False)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"cannot write to {out}: {e.strerror}") from e
    stream = recording(seed)
    wav = out / "demo.flac"
    io.write(wav, stream.audio)
    seconds = engine.config.chunk_seconds
    console.print(f"A recording of {len(stream.audio) / io.SAMPLE_RATE:.0f} s, {wav}:")
    results = []
    timeline = show.Timeline(seconds, total_s=len(stream.audio) / io.SAMPLE_RATE, console=console)
    for result in listen(engine, io.stream(wav, seconds)):
        results.append(result)
        timeline.add(result)
    timeline.close()
    console.print(_compare(stream, results, seconds))
    truth = {"timeline": stream.timeline, "spans": stream.spans, "snr_db": stream.snr_db}
    heard = [show.record(r) for r in results]
    (out / "demo.json").write_text(json.dumps({"truth": truth, "heard": heard}, indent=1))
    show.draw(
        results,
        out / "demo.png",
        threshold=engine.config.stream.threshold,
        title="what the nano model heard",
        waveform=stream.audio,
        spans=[s for s in stream.spans if s[2]],
    )
    console.print(f"See {out / 'demo.png'}; hear {wav}; or try: ai-jax listen YOUR-RECORDING")


def _compare(stream: Stream, results: Sequence[ChunkResult], seconds: float) -> Table:
    """What was sounding and due beside what was said."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("sound", "from", "reply due", "reply heard"):
        table.add_column(column)
    replies = {r.chunk + 1: r.text for r in results if r.decision == "response"}
    due = {chunk: text for chunk, text in stream.timeline}
    for start, end, label in stream.spans:
        if not label:
            continue
        first, last = int(start / seconds) + 1, int(end / seconds) + 1 + NEAR_CHUNKS
        wanted = next((due[c] for c in range(first, last) if _answers(due.get(c), label)), None)
        said = [replies.pop(c) for c in range(first, last) if c in replies]
        good = said[:1] == [wanted] if wanted else not said
        table.add_row(
            label.replace("_", " "),
            show.clock(start),
            wanted or "[dim]silence[/dim]",
            ("[green]✓[/green] " if good else "[red]✗[/red] ")
            + (" / ".join(said) or "[dim]silence[/dim]"),
        )
    return table


def _answers(text: str | None, label: str) -> bool:
    return text is not None and text == nano.ALERTS.get(label, label)
