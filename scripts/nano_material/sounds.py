"""Real sounds: from packages by file name, checked by a tagger, and from a recordings folder.

Recordings that turn up more than once (other packages, other rates, excerpts) are found by
cross-correlation and kept in one split.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import soundfile
import soxr

from ai_jax.audio import io
from ai_jax.data import nano
from ai_jax.errors import UserError
from nano_material import recordings, soundbanks
from nano_material.library import Library, divide
from nano_material.packages import Packages
from nano_material.sound_table import FARM, PACKAGES, RELATED
from nano_material.yamnet import Yamnet

RATE = io.SAMPLE_RATE
_SECONDS = (0.12, 30.0)  # shorter files are no use, longer ones are cut
_HEARD = 0.18  # the tagger's score from which it counts as agreeing
_SAME = 0.6  # normalised cross-correlation from which two files hold one recording
_AUDIO = {".wav", ".ogg", ".oga", ".flac", ".mp3"}


@dataclasses.dataclass
class Sound:
    """One candidate; group names the recording that it stems from."""

    name: str
    audio: np.ndarray
    kind: str
    labels: tuple[str, ...]
    source: str
    licence: str
    group: str

    @property
    def family(self) -> str:
        """Class within which the splits are balanced."""
        return nano.label_of(self.labels, self.kind) or "other"


def collect(library: Library, packages: Packages, folder: Path | None) -> None:
    """Gather, check, group, divide and store all sounds; notes what was dropped and why."""
    library.start("sounds")
    tagger = Yamnet(packages)
    kept = list(_recorded(folder)) if folder else []
    dropped = []
    for sound in _packaged(packages):
        heard = _heard(tagger, sound)
        if heard < _HEARD:
            dropped.append({"source": sound.source, "label": sound.labels[0], "heard": heard})
        else:
            kept.append(sound)
    kept = _without_repeats(kept)
    (library.folder / "dropped.json").write_text(json.dumps(dropped, indent=1))
    splits = {}
    for family in {sound.family for sound in kept}:
        splits[family] = divide(sound.group for sound in kept if sound.family == family)
    for sound in kept:
        library.add(
            *("sounds", sound.name, sound.audio),
            kind=sound.kind, labels=sound.labels, split=splits[sound.family][sound.group],
            source=sound.source, licence=sound.licence,
        )  # fmt: skip
    print(f"sounds: {len(kept)} kept, {len(dropped)} named otherwise by the tagger")


def _recorded(folder: Path) -> Iterator[Sound]:
    for row in recordings.load(folder):
        if row["kind"] == "speech":
            continue
        audio = io.read(folder / row["path"])[: round(_SECONDS[1] * RATE)]
        name = Path(row["path"]).stem
        # Phones that recorded several cries begin their file names with the same UUID; a key's
        # press and release are two files; some packages hold one recording at several rates.
        same = re.search(r"[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}", row["source"])
        group = same.group() if same else re.sub(r"-([01]|hi|high|med|low)$", "", name)
        labels = tuple(row["labels"])
        yield Sound(name, audio, row["kind"], labels, row["source"], row["licence"], group)


def _packaged(packages: Packages) -> Iterator[Sound]:
    """The files that the table names, in a fixed order."""
    for package, (licence, patterns) in PACKAGES.items():
        registry, name = package.split(":")
        taken: Counter[str] = Counter()
        for title, read in _files(getattr(packages, registry)(name)):
            stem = re.sub(r"\.(wav|ogg|oga|flac|mp3)$", "", title, flags=re.I)
            label = next((x for p, x in patterns.items() if re.search(rf"(^|/)({p})$", stem)), None)
            if label is None:
                continue
            try:
                audio = _usable(read())
            except (UserError, soundfile.LibsndfileError):
                continue  # a codec that the library lacks, or a damaged file
            clip = f"{name}__{'_'.join(stem.split('/')[-2:])}"
            source = f"{package}:{title.rsplit('/', 1)[-1]}"
            taken[clip] += 1
            # Folders of the same name hold files of the same name: one group, different clips.
            group = re.sub(r"-(hi|high|med|low)$", "", clip)
            if taken[clip] > 1:
                clip += f"-{taken[clip]}"
            yield Sound(clip, audio, "event", (label,), source, licence, group)


def _files(folder: Path) -> Iterator[soundbanks.Entry]:
    """Relative names of the sounds in an unpacked package, banks included, and how to read them."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        if path.suffix.lower() in _AUDIO and "voices" not in str(path).lower():
            yield str(path.relative_to(folder)), lambda path=path: io.read(path)
        elif path.suffix in soundbanks.READERS:
            for title, read in soundbanks.READERS[path.suffix](path):
                yield f"{path.stem}/{title}", read


def _usable(audio: np.ndarray) -> np.ndarray:
    """At most 30 s at a peak of 0.7; empty if too short or silent."""
    audio = audio[: round(_SECONDS[1] * RATE)]
    peak = np.abs(audio).max(initial=0)
    if len(audio) < _SECONDS[0] * RATE or peak < 1e-3:
        return audio[:0]
    return (0.7 / peak * audio).astype(np.float32)


def _heard(tagger: Yamnet, sound: Sound) -> float:
    """The tagger's highest score, over time, for the sound's name, its class or a relative."""
    if not sound.audio.size:
        return 0.0
    (label,) = sound.labels
    names = {label, *RELATED.get(label, ())}
    names |= {n for n in tagger.names if nano.label_of([n], "event") == sound.family != "other"}
    if sound.family == "animals":
        names |= set(FARM)
    columns = [i for i, name in enumerate(tagger.names) if name in names]
    return round(float(tagger.scores(sound.audio).max(axis=0)[columns].max()), 2)


def _without_repeats(sounds: list[Sound]) -> list[Sound]:
    """Drop copies of a whole file and join the groups of sounds that share a recording."""
    small = [soxr.resample(sound.audio[: 12 * RATE], RATE, 4000) for sound in sounds]
    kept: list[int] = []
    for i, sound in enumerate(sounds):
        copy = False
        for j in kept:
            if sounds[j].family != sound.family or _similarity(small[i], small[j]) < _SAME:
                continue
            lengths = sorted((len(small[i]), len(small[j])))
            copy = copy or lengths[0] > 0.9 * lengths[1]
            old, new = sound.group, sounds[j].group
            for other in sounds:
                if other.group == old and other.family == sound.family:
                    other.group = new
        if not copy:
            kept.append(i)
    return [sounds[i] for i in kept]


def _similarity(a: np.ndarray, b: np.ndarray) -> float:
    """Largest normalised correlation of the shorter signal with a stretch of the longer one."""
    if len(a) < len(b):
        a, b = b, a
    a = np.pad(a, len(b) // 2)
    size = 1 << (len(a) + len(b) - 1).bit_length()
    cross = np.fft.irfft(np.fft.rfft(a, size) * np.conj(np.fft.rfft(b, size)), size)
    cross = np.abs(cross[: len(a) - len(b) + 1])
    energy = np.concatenate([[0.0], np.cumsum(np.square(a, dtype=np.float64))])
    local = energy[len(b) :] - energy[: -len(b)]
    norm = np.sqrt(np.maximum(local, 0.05 * local.max()) * np.square(b).sum())
    return float((cross / np.maximum(norm, 1e-9)).max())
