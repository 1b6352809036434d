"""A folder of recordings with a ``manifest.json``: a list of objects with path, kind, labels,
source, licence and, where known, transcript, speaker and language."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ai_jax.audio import io
from ai_jax.data.nano import WORDS
from nano_material.library import SHARES, Library, divide
from nano_material.speech import trim


def load(folder: Path) -> list[dict]:
    return json.loads((folder / "manifest.json").read_text())


def collect(folder: Path, library: Library, synthetic: Mapping[str, str]) -> None:
    """Speech of the recordings, divided by speaker; single words of our list become "word" clips.

    synthetic: the splits of synthetic voices, so that a voice is in one split everywhere.
    """
    library.start("recordings")
    rows = [row for row in load(folder) if row["kind"] == "speech"]
    splits = dict(synthetic)
    spoken = [row for row in rows if _text(row) in WORDS]
    words = {_voice(row) for row in spoken}
    splits |= divide(words - splits.keys(), SHARES)
    splits |= divide({_voice(row) for row in rows} - splits.keys(), SHARES)
    for row in rows:
        audio = io.read(folder / row["path"])
        word = _text(row) in WORDS
        library.add(
            *("recordings", Path(row["path"]).stem, trim(audio) if word else audio),
            kind="word" if word else "speech", labels=("Speech",), text=_text(row),
            voice=_voice(row), split=splits[_voice(row)], source=row["source"],
            licence=row["licence"],
        )  # fmt: skip


def _text(row: dict) -> str:
    return (row.get("transcript") or "").lower().strip(" .,!?")


def _voice(row: dict) -> str:
    """The speaker; without a name, one a package, and one a file where volunteers recorded."""
    if row.get("speaker"):
        return row["speaker"]
    package = row["source"].split("@")[0].split("=")[0]
    return row["source"] if "wake-word" in package else package
