"""How well a model listens: decisions and sentences on sounds, words of a closed list.

Every clip is heard as a stream of its own: two seconds of faint room tone, the clip, two seconds
more. Nothing is teacher-forced: the model hears what it would hear from a microphone. Sounds answer
to these questions (1 to 4), words and speech to the others:

1. recall: share of the clips that deserve a response that got one,
2. silent: share of the other clips that got none; balanced accuracy is the mean of 1 and 2,
3. right: share of the clips that deserve a response whose first reply is the right sentence,
4. false alarms per minute of benign sound,
5. words: share of the spoken words whose first reply is that word,
6. speech: share of the clips of running speech, which is not addressed to the model, without reply.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ai_jax.audio.io import SAMPLE_RATE as RATE
from ai_jax.data import nano
from ai_jax.data.sources import Material
from ai_jax.errors import UserError
from ai_jax.stream.engine import Engine
from ai_jax.stream.listen import ChunkResult, listen

KINDS = ("alert", "benign", "word", "speech")
LEAD_S = 2.0  # room tone before and after each clip
CLIP_S = 8.0  # longer clips are cut to their loudest stretch of this length
PEAK = 0.5  # clips are brought to this peak
ROOM_TONE = 1e-3  # standard deviation of the noise under everything: -60 dB of full scale


@dataclasses.dataclass(frozen=True)
class Heard:
    """One clip and the replies it drew; expected is None for a sound that deserves none."""

    path: str
    kind: str
    label: str
    seconds: float
    expected: str | None
    replies: tuple[str, ...]
    p_max: float

    @property
    def right(self) -> bool:
        return bool(self.replies) and self.replies[0] == self.expected


@dataclasses.dataclass(frozen=True)
class Report:
    """Measurements over ``heard``; shares lie in [0, 1], NaN where there was nothing to measure."""

    split: str
    threshold: float
    heard: tuple[Heard, ...]
    seconds: float  # of sound heard
    took: float  # seconds of computing

    def _of(self, kind: str) -> list[Heard]:
        return [h for h in self.heard if h.kind == kind]

    @property
    def recall(self) -> float:
        return _mean([bool(h.replies) for h in self._of("alert")])

    @property
    def silent(self) -> float:
        return _mean([not h.replies for h in self._of("benign")])

    @property
    def balanced(self) -> float:
        return (self.recall + self.silent) / 2

    @property
    def right(self) -> float:
        return _mean([h.right for h in self._of("alert")])

    @property
    def false_alarms_per_minute(self) -> float:
        benign = self._of("benign")
        minutes = sum(h.seconds for h in benign) / 60
        return sum(len(h.replies) for h in benign) / minutes if minutes else float("nan")

    @property
    def speech(self) -> float:
        return _mean([not h.replies for h in self._of("speech")])

    @property
    def words(self) -> float:
        return _mean([h.right for h in self._of("word")])


def evaluate(
    engine: Engine,
    folder: Path,
    split: str,
    threshold: float | None = None,
    kinds: Sequence[str] = KINDS,
) -> Report:
    """Let ``engine`` hear the clips of ``split`` of the material in ``folder``.

    threshold: the model's own where None. kinds: which of the clips. Raises UserError if there is
    none.
    """
    threshold = engine.config.stream.threshold if threshold is None else threshold
    material = Material(folder)
    tests = [test for test in _tests(material, split) if test[1] in kinds]
    if not tests:
        raise UserError(f"{folder} has no recordings in the split '{split}' (try val or test)")
    started, heard, seconds = time.monotonic(), [], 0.0
    with Progress(transient=True, console=Console(stderr=True)) as progress:
        for row, kind, label, expected in progress.track(tests, description=f"hearing {split}"):
            audio = _loudest(material.read(row))
            stream = _stream(audio, seed=zlib.crc32(row.path.encode()))
            results = list(listen(engine, [stream], threshold=threshold))
            heard.append(_judge(row.path, kind, label, expected, len(audio) / RATE, results))
            seconds += len(stream) / RATE
    return Report(split, threshold, tuple(heard), seconds, time.monotonic() - started)


def table(report: Report) -> Table:
    """The five measurements and, class by class, what was heard."""
    out = Table(title=f"{report.split}: {len(report.heard)} clips, threshold {report.threshold:g}")
    for column in ("", "value", "clips"):
        out.add_column(column, justify="left" if not column else "right")
    n = {kind: len(report._of(kind)) for kind in KINDS}
    rows = [
        ("balanced accuracy, respond or stay silent", report.balanced, n["alert"] + n["benign"]),
        ("  recall: alarming sounds answered", report.recall, n["alert"]),
        ("  benign sounds left unanswered", report.silent, n["benign"]),
        ("alarming sounds answered with the right sentence", report.right, n["alert"]),
        ("false alarms per minute of benign sound", report.false_alarms_per_minute, n["benign"]),
        ("words written right, unseen voices", report.words, n["word"]),
        ("running speech left unanswered", report.speech, n["speech"]),
    ]
    for name, value, count in rows:
        out.add_row(name, f"{value:.2f}", str(count))
    out.add_section()
    for label, clips in _by_label(report).items():
        kind = clips[0].kind
        silent = kind in ("benign", "speech")
        good = [not h.replies if silent else h.right for h in clips]
        what = "silent" if silent else "right"
        out.add_row(f"{kind}: {label} ({what})", f"{_mean(good):.2f}", str(len(clips)))
    out.caption = (
        f"{report.seconds / 60:.1f} minutes of sound heard in {report.took:.0f} s: "
        f"real-time factor {report.took / report.seconds:.3f}"
    )
    return out


def save(reports: Sequence[Report], path: Path) -> None:
    """Write the measurements of each report, and every clip, as JSON."""
    names = (
        *("balanced", "recall", "silent", "right"),
        *("false_alarms_per_minute", "words", "speech"),
    )
    data = [{name: getattr(r, name) for name in names} | dataclasses.asdict(r) for r in reports]
    partial = path.with_name(f".{path.name}.part")
    partial.write_text(json.dumps(data, indent=1), encoding="utf-8")
    os.replace(partial, path)


def _by_label(report: Report) -> dict[str, list[Heard]]:
    groups = defaultdict(list)
    for h in sorted(report.heard, key=lambda h: (h.kind, h.label)):
        groups[h.label].append(h)
    return groups


def _tests(material: Material, split: str) -> list[tuple]:
    """(row, kind, label, expected reply, samples) of every clip that has one clear answer."""
    tests = []
    for row in material.rows(split=split):
        if row.kind == "word" and row.text in nano.WORDS:
            tests.append((row, "word", row.text, row.text))
        elif row.kind in ("speech", "word"):
            tests.append((row, "speech", nano.SPEECH, None))
        elif (label := nano.label_of(row.labels, row.kind)) in nano.ALERTS:
            tests.append((row, "alert", label, nano.ALERTS[label]))
        elif label is not None:
            tests.append((row, "benign", label, None))
    return tests


def _stream(audio: np.ndarray, seed: int) -> np.ndarray:
    """The clip at ``PEAK`` between two stretches of room tone."""
    lead = int(LEAD_S * RATE)
    noise = np.random.default_rng(seed).standard_normal(len(audio) + 2 * lead)
    stream = (ROOM_TONE * noise).astype(np.float32)
    stream[lead : lead + len(audio)] += PEAK * audio / max(float(np.abs(audio).max()), 1e-6)
    return stream


def _loudest(audio: np.ndarray) -> np.ndarray:
    """The ``CLIP_S`` seconds with the most energy."""
    size = int(CLIP_S * RATE)
    if len(audio) <= size:
        return audio
    energy = np.concatenate([[0.0], np.cumsum(np.square(audio, dtype=np.float64))])
    start = int(np.argmax(energy[size:] - energy[:-size]))
    return audio[start : start + size]


def _judge(path, kind, label, expected, seconds, results: list[ChunkResult]) -> Heard:
    replies = tuple(r.text for r in results if r.decision == "response")
    p_max = max(r.p_response for r in results)
    return Heard(path, kind, label, seconds, expected, replies, p_max)


def _mean(values: list[bool]) -> float:
    return float(np.mean(values)) if values else float("nan")
