"""Composes clips into one stream with its response timeline (the paper's Algorithm 4).

The composition is a pure function of its arguments and the state of ``rng``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from ai_jax.errors import UserError

Role = Literal["foreground", "background", "ambient"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComposeConfig:
    """Constants of Algorithm 4.

    chunk: seconds that the model hears at a time (c). fade: seconds of the tapers at the ends of a
    clip and of the crossfades inside a noise track (omega). background_gain_db, ambient_gain_db:
    role gains. snr_db: range that both signal-to-noise ratios are drawn from; the ambient track's
    is then raised by ambient_snr_db. silent_level_db: level (dBFS) that a noise track is measured
    against where the stream has nothing else to hear.
    """

    sample_rate: int = 16000
    chunk: float = 0.4
    fade: float = 0.02
    background_gain_db: float = -6.0
    ambient_gain_db: float = -12.0
    snr_db: tuple[float, float] = (5.0, 20.0)
    ambient_snr_db: float = 5.0
    silent_level_db: float = -25.0

    def __post_init__(self) -> None:
        if self.chunk_samples < 1 or self.fade < 0:
            raise UserError(f"chunk must be > 0 and fade >= 0 (got {self.chunk}, {self.fade})")
        if self.snr_db[0] > self.snr_db[1]:
            raise UserError(f"snr_db must be (lowest, highest) (got {self.snr_db})")

    @property
    def chunk_samples(self) -> int:
        return round(self.chunk * self.sample_rate)

    @property
    def fade_samples(self) -> int:
        return round(self.fade * self.sample_rate)

    def gain(self, role: Role) -> float:
        """Amplitude factor of ``role``."""
        gain_db = {"background": self.background_gain_db, "ambient": self.ambient_gain_db}
        return 10.0 ** (gain_db.get(role, 0.0) / 20.0)


@dataclasses.dataclass(frozen=True, eq=False)
class Event:
    """A clip and what it asks for.

    audio: [samples], 16 kHz. trigger: seconds after the clip's start at which it can be answered
    (d_i of Algorithm 4); None is the clip's end. response: the answer, None to stay silent; only
    foreground is answered. label: what the sound is, may be empty.
    """

    audio: np.ndarray
    role: Role = "foreground"
    trigger: float | None = None
    response: str | None = None
    label: str = ""

    def __post_init__(self) -> None:
        if self.audio.ndim != 1 or self.audio.size == 0:
            raise UserError(f"the event '{self.label}' needs mono audio, not {self.audio.shape}")
        if self.role not in ("foreground", "background", "ambient"):
            raise UserError(f"the event '{self.label}' has the unknown role '{self.role}'")
        if self.response is not None and self.role != "foreground":
            raise UserError(
                f"the {self.role} event '{self.label}' has a response; make it foreground"
            )
        if self.trigger is not None and not 0 <= self.trigger < float("inf"):
            raise UserError(f"the event '{self.label}' has an impossible trigger: {self.trigger} s")


class Plan(NamedTuple):
    """What to compose: events in order, and the clips that the two noise tracks are made of."""

    events: Sequence[Event]
    noise_events: Sequence[np.ndarray] = ()
    noise_ambient: Sequence[np.ndarray] = ()


class Stream(NamedTuple):
    """A composed stream.

    audio: float32 [samples], peak <= 1. timeline: (chunk, response), chunks 1-based and strictly
    increasing. spans: (start seconds, end seconds, label) of every event that is heard, in the
    order of the plan. snr_db: the ratios drawn for the event-like and the ambient noise track.
    """

    audio: np.ndarray
    timeline: tuple[tuple[int, str], ...]
    spans: tuple[tuple[float, float, str], ...]
    snr_db: tuple[float, float]


def compose(
    events: Sequence[Event],
    noise_events: Sequence[np.ndarray],
    noise_ambient: Sequence[np.ndarray],
    rng: np.random.Generator,
    config: ComposeConfig | None = None,
    *,
    chunks: int | None = None,
    preprocess: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Stream:
    """Compose a stream (Algorithm 4).

    Foreground clips follow each other with tapered ends. Background and ambient clips are added at
    random offsets of the whole track, whatever their place in the list. Each non-empty noise pool
    becomes a track over the full stream, scaled to its signal-to-noise ratio: the
    :func:`active_power` of everything else over that of the noise. A mix that would clip is turned
    down as a whole, which leaves all ratios as they are.

    chunks: exact length; a shorter stream is padded with silence (under the noise), a longer one is
    cut and loses the responses beyond the end. Without it the stream is as long as its foreground
    (longer only where a response falls later). preprocess: applied to every clip first (TFJP).

    Responses that fall into the same chunk are told apart by moving the later one to the next free
    chunk, as Algorithm 2 needs strictly increasing ones.
    """
    config = config or ComposeConfig()
    waves = [_prepare(event, preprocess, config.fade_samples) for event in events]
    offsets, main_length, triggers = _lay_out(events, waves, config)
    timeline = resolve(triggers, config.chunk_samples)
    length = _length(main_length, timeline, chunks, config.chunk_samples)
    timeline = tuple(r for r in timeline if (r[0] - 1) * config.chunk_samples < length)

    audio = np.zeros(length, np.float32)
    spans = []
    for event, wave, offset in zip(events, waves, offsets, strict=True):
        start, end = _mix_in(audio, wave, offset, config.gain(event.role), rng)
        if start < end:
            spans.append((start / config.sample_rate, end / config.sample_rate, event.label))

    snr_event = rng.uniform(*config.snr_db)
    snr_ambient = rng.uniform(*config.snr_db) + config.ambient_snr_db
    frame = max(config.fade_samples, 1)
    power = active_power(audio, frame) or 10.0 ** (config.silent_level_db / 10.0)
    for pool, snr in ((noise_events, snr_event), (noise_ambient, snr_ambient)):
        noise = tile_crossfade(pool, length, rng, config.fade_samples)
        noise_power = active_power(noise, frame)
        if noise_power > 0.0:
            noise *= np.sqrt(power / noise_power * 10.0 ** (-snr / 10.0))
            audio += noise
    peak = max(audio.max(), -audio.min())
    if peak > 1.0:
        audio /= peak
    return Stream(audio, timeline, tuple(spans), (snr_event, snr_ambient))


def resolve(triggers: Sequence[tuple[int, str]], chunk_samples: int) -> tuple[tuple[int, str], ...]:
    """(samples, response) -> (chunk, response): the first 1-based chunk at whose end all the
    samples have been heard, or the next free one where an earlier response has taken it."""
    timeline: list[tuple[int, str]] = []
    for samples, response in sorted(triggers, key=lambda t: t[0]):
        chunk = max(-(-samples // chunk_samples), 1)
        if timeline:
            chunk = max(chunk, timeline[-1][0] + 1)
        timeline.append((chunk, response))
    return tuple(timeline)


def active_power(audio: np.ndarray, frame: int) -> float:
    """Mean square over the active frames of ``audio``: those within 40 dB of the loudest.

    Pauses thus change neither the level of a signal nor that of an intermittent noise. Digital
    silence has power 0.
    """
    whole = audio.size // frame * frame
    frames = audio[:whole].reshape(-1, frame)
    power = np.einsum("nf,nf->n", frames, frames) / np.float32(frame)
    if whole < audio.size:
        power = np.append(power, np.mean(np.square(audio[whole:])))
    loudest = power.max(initial=0.0)
    return float(np.mean(power[power >= 1e-4 * loudest], dtype=np.float64)) if loudest else 0.0


def fade(audio: np.ndarray, samples: int) -> np.ndarray:
    """A float32 copy whose first and last ``samples`` (half of it at most) follow a Hann taper."""
    out = np.array(audio, np.float32)
    n = min(samples, out.size // 2)
    if n:
        ramp = np.sin(np.pi / 2 * np.arange(n) / n).astype(np.float32) ** 2
        out[:n] *= ramp
        out[-n:] *= ramp[::-1]
    return out


def tile_crossfade(
    clips: Sequence[np.ndarray], length: int, rng: np.random.Generator, samples: int
) -> np.ndarray:
    """A float32 track of exactly ``length`` samples made of ``clips`` in random order.

    Clips repeat until the track is full, each joined to the one before by an equal-power crossfade
    of ``samples`` (half a clip at most). A clip longer than what is missing gives a random excerpt.
    No clips: silence.
    """
    track = np.zeros(length, np.float32)
    clips = [clip for clip in clips if clip.size]
    if not clips:
        return track
    end = previous = 0
    for index in itertools.cycle(rng.permutation(len(clips))):
        if end == length:
            return track
        clip = clips[index]
        overlap = min(samples, previous // 2, clip.size // 2)
        room = length - end + overlap
        if clip.size > room:
            start = rng.integers(clip.size - room + 1)
            clip = clip[start : start + room]
        if overlap:
            angle = np.pi / 2 * (np.arange(overlap, dtype=np.float32) + 0.5) / overlap
            track[end - overlap : end] *= np.cos(angle)
            track[end - overlap : end] += clip[:overlap] * np.sin(angle)
        track[end : end + clip.size - overlap] = clip[overlap:]
        end += clip.size - overlap
        previous = clip.size
    raise AssertionError("unreachable: the cycle is endless")


def _prepare(
    event: Event, preprocess: Callable[[np.ndarray], np.ndarray] | None, fade_samples: int
) -> np.ndarray:
    wave = event.audio if preprocess is None else preprocess(event.audio)
    wave = fade(wave, fade_samples)
    if not np.isfinite([wave.min(), wave.max()]).all():
        raise UserError(f"the event '{event.label}' holds NaN or infinite samples")
    return wave


def _lay_out(
    events: Sequence[Event], waves: Sequence[np.ndarray], config: ComposeConfig
) -> tuple[list[int | None], int, list[tuple[int, str]]]:
    """Offsets (None: to be drawn), length of the foreground, and (samples, response) pairs."""
    offsets: list[int | None] = []
    triggers = []
    length = 0
    for event, wave in zip(events, waves, strict=True):
        if event.role != "foreground":
            offsets.append(None)
            continue
        offsets.append(length)
        if event.response is not None:
            # Whole samples: 0.4 * 3 is more than 1.2, and a ceiling would answer a chunk late.
            after = wave.size if event.trigger is None else event.trigger * config.sample_rate
            triggers.append((length + round(after), event.response))
        length += wave.size
    return offsets, length, triggers


def _length(
    main_length: int, timeline: Sequence[tuple[int, str]], chunks: int | None, chunk_samples: int
) -> int:
    """Samples of the stream."""
    if chunks is not None:
        length = chunks * chunk_samples
    else:
        length = main_length
        if timeline and (timeline[-1][0] - 1) * chunk_samples >= length:
            length = timeline[-1][0] * chunk_samples
    if length < 1:
        raise UserError("nothing to compose: give a foreground event or a number of chunks")
    return length


def _mix_in(
    main: np.ndarray, wave: np.ndarray, offset: int | None, gain: float, rng: np.random.Generator
) -> tuple[int, int]:
    """Add ``wave`` to ``main`` in place, at a random offset if it has none; returns its span."""
    if offset is None:
        # A clip longer than the track gives a random excerpt of the track's length.
        slack = main.size - wave.size
        draw = int(rng.integers(abs(slack) + 1))
        offset, wave = (draw, wave) if slack >= 0 else (0, wave[draw : draw + main.size])
    wave = wave[: max(main.size - offset, 0)]
    end = offset + wave.size
    if gain != 1.0:
        wave = wave * np.float32(gain)
    main[offset:end] += wave
    return offset, end
