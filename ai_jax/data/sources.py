"""A folder of clips with a manifest: what streams are composed from.

``manifest.jsonl`` holds one JSON object a line, see :class:`Row`. ``scripts/nano_material.py``
builds such a folder.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from ai_jax.audio import io
from ai_jax.errors import UserError

Kind = Literal["word", "speech", "event", "music", "noise"]
Split = Literal["train", "val", "test"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One clip.

    path: audio file relative to the folder. kind: "word" is one spoken word, "speech" is running
    speech, "event" a sound with a cause. labels: AudioSet names. text: what is said, "" if unknown
    or nothing. voice: speaker or synthetic voice, "" if none. duration_s: seconds. source: package
    and file that the clip comes from. licence: of that source.
    """

    path: str
    kind: Kind
    labels: tuple[str, ...]
    text: str
    voice: str
    split: Split
    duration_s: float
    source: str
    licence: str


class Material:
    """The clips of ``folder``, in the order of its manifest.

    Raises:
      UserError: no readable ``manifest.jsonl``, or a line of it is not a :class:`Row`.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        manifest = self.folder / "manifest.jsonl"
        try:
            lines = manifest.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as e:
            reason = getattr(e, "strerror", None) or e
            raise UserError(
                f"cannot read {manifest}: {reason}; build a material folder with "
                "scripts/nano_material.py"
            ) from e
        self._rows = tuple(_parse(line, f"{manifest}:{i}") for i, line in enumerate(lines, 1))

    def rows(
        self, *, kind: Kind | None = None, split: Split | None = None, label: str | None = None
    ) -> tuple[Row, ...]:
        """The rows of that kind and split that carry that AudioSet name; None takes all."""
        return tuple(
            row
            for row in self._rows
            if kind in (None, row.kind)
            and split in (None, row.split)
            and (label is None or label in row.labels)
        )

    def read(self, row: Row) -> np.ndarray:
        """The clip as float32 ``[samples]`` at 16 kHz; raises as :func:`ai_jax.audio.io.read`."""
        return io.read(self.folder / row.path)


def _parse(line: str, where: str) -> Row:
    """The row in one line of a manifest; unknown keys are an error, so that typos show."""
    try:
        data: Any = json.loads(line)
    except json.JSONDecodeError as e:
        raise UserError(f"{where}: not valid JSON ({e.msg})") from e
    names = {field.name for field in dataclasses.fields(Row)}
    if not isinstance(data, dict) or set(data) != names:
        odd = sorted(names.symmetric_difference(data)) if isinstance(data, dict) else "no object"
        raise UserError(f"{where}: expected exactly the keys of a clip; check {odd}")
    for name, choices in (("kind", get_args(Kind)), ("split", get_args(Split))):
        if data[name] not in choices:
            raise UserError(f"{where}: {name} '{data[name]}' must be one of {', '.join(choices)}")
    return Row(**{**data, "labels": tuple(data["labels"])})
