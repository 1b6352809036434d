"""Where the clips go: FLAC files in folders by kind, one list a part, one manifest for all."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from ai_jax.audio import io
from ai_jax.data.sources import Row, Split

SHARES: Mapping[Split, float] = {"train": 0.50, "val": 0.15, "test": 0.35}
VOICE_SHARES: Mapping[Split, float] = {"train": 0.70, "val": 0.10, "test": 0.20}


def divide(names: Iterable[str], shares: Mapping[Split, float] = SHARES) -> dict[str, Split]:
    """Assign each name to a split, close to ``shares`` however few there are.

    Names are taken in the order of their SHA-256, and each goes where most is missing, so neither
    the order of files nor a seed matters. Pass the sources of one class at a time, and for clips
    that share a recording one name.
    """
    ordered = sorted(set(names), key=lambda name: hashlib.sha256(name.encode()).digest())
    counts: dict[Split, int] = dict.fromkeys(shares, 0)
    result: dict[str, Split] = {}
    for i, name in enumerate(ordered, 1):
        split = max(shares, key=lambda s: shares[s] * i - counts[s])
        counts[split] += 1
        result[name] = split
    return result


class Library:
    """A material folder under construction. A part is a list of rows that is rebuilt as a whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._parts = folder / "parts"
        self._parts.mkdir(parents=True, exist_ok=True)

    def start(self, part: str) -> None:
        """Remove the rows of ``part`` and their files."""
        for row in self.rows(part):
            (self.folder / row["path"]).unlink(missing_ok=True)
        (self._parts / f"{part}.jsonl").write_text("")

    def rows(self, part: str) -> list[dict]:
        path = self._parts / f"{part}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def add(self, part: str, name: str, audio: np.ndarray, **fields: object) -> None:
        """Write 16 kHz ``audio`` as ``<kind>/<name>.flac`` and note its row; fields are Row's."""
        path = f"{fields['kind']}/{re.sub(r'[^A-Za-z0-9._-]+', '_', name)}.flac"
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        io.write(self.folder / path, audio)
        defaults = {"labels": (), "text": "", "voice": ""}
        row = Row(path=path, duration_s=round(len(audio) / 16000, 3), **(defaults | fields))
        with (self._parts / f"{part}.jsonl").open("a") as file:
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")

    def publish(self) -> int:
        """Join the parts into ``manifest.jsonl``; returns the number of clips."""
        lines = [
            line
            for path in sorted(self._parts.glob("*.jsonl"))
            for line in path.read_text().splitlines()
        ]
        temporary = self.folder / "manifest.jsonl.tmp"
        temporary.write_text("".join(line + "\n" for line in lines))
        temporary.replace(self.folder / "manifest.jsonl")
        return len(lines)
