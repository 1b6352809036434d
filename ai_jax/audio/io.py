"""Read audio files as 16 kHz mono, whole or as a stream in constant memory, and write them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import soundfile
import soxr

from ai_jax.errors import UserError

SAMPLE_RATE = 16000
_BLOCK = 1 << 17  # samples decoded or encoded at once, over all channels
_RATES = (1_000, 1_000_000)  # input rates in Hz that make sense for sound


class Resampler:
    """Resampling of a mono stream, with state: pieces join without a seam.

    Args:
      rate_in, rate_out: Hz, 1 kHz to 1 MHz. Equal rates pass samples through unchanged.

    Raises:
      UserError: a rate outside that range.
    """

    def __init__(self, rate_in: int, rate_out: int = SAMPLE_RATE) -> None:
        for rate in (rate_in, rate_out):
            if not _RATES[0] <= rate <= _RATES[1]:
                raise UserError(
                    f"a sample rate of {rate} Hz is not supported; "
                    f"use {_RATES[0]} to {_RATES[1]} Hz"
                )
        same = rate_in == rate_out
        self._soxr = None if same else soxr.ResampleStream(rate_in, rate_out, 1, dtype="float32")

    def push(self, samples: np.ndarray) -> np.ndarray:
        """Take float32 ``[samples]`` and return the output that is ready, float32 ``[any]``."""
        samples = np.ascontiguousarray(samples, np.float32)
        return samples if self._soxr is None else self._soxr.resample_chunk(samples)

    def flush(self) -> np.ndarray:
        """End the stream and return the rest of the output; the object is then as new."""
        rest = np.zeros(0, np.float32)
        if self._soxr is not None:
            rest = self._soxr.resample_chunk(rest, last=True)
            self._soxr.clear()
        return rest


def read(path: str | Path) -> np.ndarray:
    """The whole file as float32 ``[samples]``, mono (mean of the channels) at 16 kHz.

    Any format of libsndfile: WAV, FLAC, OGG, MP3, ..., of any rate and number of channels.

    Raises:
      UserError: the file is missing, unreadable, not audio, without samples, or holds NaN or
        infinite samples.
    """
    return np.concatenate(list(_decode(Path(path))))


def stream(path: str | Path, block_seconds: float) -> Iterator[np.ndarray]:
    """The samples of :func:`read` in blocks of ``block_seconds`` (the last may be shorter).

    Memory does not grow with the file. Raises as :func:`read`, when the block is reached.
    """
    size = round(block_seconds * SAMPLE_RATE)
    if size < 1:
        raise UserError(f"block_seconds must be at least one sample (got {block_seconds})")
    rest = np.zeros(0, np.float32)
    for samples in _decode(Path(path)):
        rest = np.concatenate([rest, samples])
        whole = rest.size - rest.size % size
        yield from rest[:whole].reshape(-1, size)
        rest = rest[whole:]
    if rest.size:
        yield rest


def _decode(path: Path) -> Iterator[np.ndarray]:
    """Decode, mix down and resample ``path`` in pieces that depend on nothing but the file."""
    with _open(path) as file:
        try:
            resampler = Resampler(file.samplerate)
        except UserError as e:
            raise UserError(f"cannot use {path}: {e}") from None
        block = max(1, _BLOCK // file.channels)
        seen = made = 0
        while True:
            try:
                frames = file.read(block, dtype="float32", always_2d=True)
            except soundfile.LibsndfileError as e:
                at = seen / file.samplerate
                raise UserError(f"cannot decode {path} after {at:.3f} s: {_reason(e)}") from e
            if not len(frames):
                break
            good = np.isfinite(frames).all(axis=1)
            if not good.all():
                at = (seen + int(np.argmin(good))) / file.samplerate
                raise UserError(
                    f"{path} has a NaN or infinite sample at {at:.3f} s; repair the recording"
                )
            seen += len(frames)
            samples = resampler.push(frames.mean(axis=1))
            made += samples.size
            yield samples
        samples = resampler.flush()
        if not made + samples.size:
            raise UserError(f"{path} holds no audio samples; give a recording that is not empty")
        yield samples


def _open(path: Path) -> soundfile.SoundFile:
    try:
        if path.is_dir():
            raise UserError(f"{path} is a directory; give an audio file")
        if not path.stat().st_size:
            raise UserError(f"{path} is empty; give an audio file")
        return soundfile.SoundFile(path)
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror or e}") from e
    except (soundfile.LibsndfileError, TypeError) as e:  # TypeError: headerless, such as .raw
        raise UserError(
            f"{path} is not audio in a known format, or damaged; use WAV, FLAC, OGG or MP3"
        ) from e


def write(path: str | Path, audio: np.ndarray, rate: int = SAMPLE_RATE) -> None:
    """Write float ``[samples]`` in [-1, 1] (louder samples are clipped) as ``path``.

    The suffix names the format: .wav, .flac, .ogg or .mp3; samples are rounded to 16 bits. The file
    appears whole or not at all: it is written under a temporary name beside ``path`` and renamed.

    Raises:
      UserError: an unknown suffix, no or non-finite samples, or a folder that cannot be written.
    """
    path, audio = Path(path), np.asarray(audio)
    format = path.suffix[1:].upper()
    if format not in ("WAV", "FLAC", "OGG", "MP3"):
        raise UserError(f"cannot write {path}: the name must end in .wav, .flac, .ogg or .mp3")
    if audio.ndim != 1 or not audio.size or not np.issubdtype(audio.dtype, np.floating):
        raise UserError(f"cannot write {path}: the audio must be one channel of float samples")
    if not np.isfinite(audio).all():
        raise UserError(f"cannot write {path}: the audio has NaN or infinite samples")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with (
            temporary.open("wb") as raw,
            soundfile.SoundFile(raw, "w", rate, channels=1, format=format) as file,
        ):
            # In blocks, because libsndfile overflows its stack on a long recording as OGG.
            for start in range(0, audio.size, _BLOCK):
                samples = np.rint(32768.0 * audio[start : start + _BLOCK].astype(np.float64))
                file.write(np.clip(samples, -32768, 32767).astype(np.int16))
        os.replace(temporary, path)
    except (OSError, soundfile.LibsndfileError) as e:
        raise UserError(f"cannot write {path}: {_reason(e)}") from e
    finally:
        with contextlib.suppress(OSError):  # gone: renamed, or never made
            temporary.unlink()


def _reason(e: Exception) -> str:
    """The library's own words without the file name that it puts in front."""
    text = getattr(e, "error_string", None) or getattr(e, "strerror", None) or str(e)
    return " ".join(text.split()).rstrip(".")
