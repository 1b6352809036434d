"""Log-mel features, one causal definition for training and streaming (NumPy only).

Frame ``k`` is Whisper's: a periodic Hann window of 25 ms centred on sample ``160 k``. What differs
is the normalisation, ``(max(x, M - 8) + 4) / 4``: Whisper's ``M`` is the maximum of the whole clip,
which a stream cannot know. Here ``M`` is the running maximum up to the end of the frame's own chunk
(40 frames, 400 ms), never below ``MelConfig.floor``.

Frames therefore come out a chunk at a time. The last frame of a chunk reaches 40 samples into the
next chunk (``MelConfig.lookahead``), so chunk ``i`` is complete when sample
``6400 (i + 1) + 40`` has arrived: the features lag the sound by 2.5 ms. Someone who feeds pieces of
exactly one chunk gets chunk ``i`` only with piece ``i + 1``; live sources should use short pieces.

The features are the same bits however a stream is cut into pieces: every chunk is computed alone,
by the same calls on the same shapes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

import numpy as np

from ai_jax.errors import UserError

_SMALLEST = 1e-10  # Whisper's least mel energy; also what keeps the logarithm finite in silence
_RANGE = 8.0  # log10 energy kept below the maximum: 80 dB
_LOUDEST = 1e10  # no sound, but its energy still fits float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class MelConfig:
    """Whisper's log-mel: 16 kHz, 25 ms Hann windows every 10 ms.

    n_mels: bands of the Slaney filter bank, 0 Hz to half the sample rate.
    normalization: "stream" (causal, see the module) or "clip" (maximum of the whole clip and both
        ends reflected: Hugging Face's ``WhisperFeatureExtractor`` without its padding).
    floor: least value of the running maximum (log10 energy; a full-scale 1 kHz tone has 2.5).
    chunk_frames: frames that share one running maximum and are emitted together.

    A low floor shows a quiet opening down to its faintest noise, as no later part of the stream is
    shown; a high one hides the detail of quiet recordings. 0.0 was chosen on 283 real recordings
    (speech, events, music; 0.4 s to 11 s), by the mean difference between "stream" and "clip"
    features, which know the true maximum:

    ====================================================  =====  =====  =====  =====  =====
    floor                                                  -2.0   -1.0    0.0    1.0    2.0
    ====================================================  =====  =====  =====  =====  =====
    whole recordings                                      0.015  0.013  0.013  0.022  0.072
    1.2 s opening of digital silence before them          0.742  0.498  0.288  0.171  0.264
    1.2 s opening of noise at -80 dBFS                    0.192  0.191  0.179  0.125  0.218
    1.2 s opening of noise at -60 dBFS                    0.005  0.005  0.005  0.004  0.013
    recordings whose own maximum lies below the floor        0%     4%    14%    42%    94%
    ====================================================  =====  =====  =====  =====  =====
    """

    sample_rate: int = 16000
    n_fft: int = 400
    hop_length: int = 160
    n_mels: int = 128
    normalization: Literal["stream", "clip"] = "stream"
    floor: float = 0.0
    chunk_frames: int = 40

    def __post_init__(self) -> None:
        for name in ("sample_rate", "n_fft", "hop_length", "n_mels", "chunk_frames"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be >= 1 (got {getattr(self, name)})")
        if self.n_fft % 2 or self.n_fft < self.hop_length:
            raise UserError(f"n_fft must be even and at least hop_length (got {self.n_fft})")
        if not math.isfinite(self.floor):
            raise UserError(f"floor must be a finite number (got {self.floor})")

    @property
    def chunk_samples(self) -> int:
        """Samples from the start of one chunk to the start of the next."""
        return self.chunk_frames * self.hop_length

    @property
    def lookahead(self) -> int:
        """Samples of the next chunk that a chunk's last frame needs (40: 2.5 ms)."""
        return self.n_fft // 2 - self.hop_length


def log_mel(audio: np.ndarray, config: MelConfig) -> np.ndarray:
    """Log-mel features of a whole recording.

    Args:
      audio: ``[samples]``, floating point at ``config.sample_rate``.

    Returns:
      float32 ``[frames, n_mels]``. "stream": ``ceil(samples / hop_length)`` frames, bit for bit
      what :class:`StreamingLogMel` gives; "clip": ``samples // hop_length`` (at least one).
      "clip" equals Whisper's extractor in float64 to 1e-6; the extractor's own float32 torch path
      strays up to 6e-5 from that near the clamp.

    Raises:
      UserError: not one channel of floating-point samples, or a sample that is NaN or infinite.
    """
    if config.normalization == "stream":
        stream = StreamingLogMel(config)
        return np.concatenate([stream.push(audio), stream.flush()])
    audio = _checked(audio, config, start=0)
    if not audio.size:
        return np.zeros((0, config.n_mels), np.float32)
    frames = max(1, audio.size // config.hop_length)
    chunks = -(-frames // config.chunk_frames)
    padded = np.pad(audio, config.n_fft // 2, mode="reflect")
    padded = np.pad(padded, (0, max(0, _span(chunks, config) - padded.size)))
    x_fm = _log_energy(padded, chunks, config).reshape(-1, config.n_mels)[:frames]
    return _scaled(x_fm, x_fm.max())


class StreamingLogMel:
    """Log-mel features of a stream that arrives in pieces of any size.

    >>> stream = StreamingLogMel(MelConfig())
    >>> [stream.push(np.zeros(n, np.float32)).shape[0] for n in (6400, 39, 1)], len(stream.flush())
    ([0, 0, 40], 1)

    The features do not depend on how the samples were cut into pieces, to the bit.
    """

    def __init__(self, config: MelConfig) -> None:
        if config.normalization != "stream":
            raise UserError(
                f"normalization '{config.normalization}' needs the whole recording and cannot be "
                "streamed; use normalization 'stream'"
            )
        self.config = config
        self._reset()

    def _reset(self) -> None:
        self._samples = 0  # received so far
        self._frames = 0  # returned so far
        self._maximum = self.config.floor
        # From the left edge of the next frame on. The first frame's left half is the reflection of
        # the samples that follow, so the buffer opens once those are there.
        self._buffer = np.zeros(0, np.float32)
        self._open = False

    def push(self, samples: np.ndarray) -> np.ndarray:
        """Take ``samples`` (``[any]``, floating point), return the chunks that they complete.

        Returns float32 ``[chunk_frames * chunks, n_mels]``, often without a row.

        Raises:
          UserError: as :func:`log_mel`, naming the time of the first bad sample; the stream is as
            before the call.
        """
        samples = _checked(samples, self.config, start=self._samples)
        self._samples += samples.size
        return self._append(samples)

    def flush(self) -> np.ndarray:
        """End the stream: return the remaining frames, float32 ``[frames, n_mels]``.

        The end is padded with zeros; ``ceil(samples / hop_length)`` frames come out in all. The
        object is then as new, ready for another stream.
        """
        config = self.config
        rest = -(-self._samples // config.hop_length) - self._frames
        # More than enough zeros to complete the chunk of the last frame.
        x_fm = self._append(np.zeros(_span(2, config), np.float32), last=rest)
        self._reset()
        return x_fm

    def _append(self, samples: np.ndarray, last: int | None = None) -> np.ndarray:
        """Extend the buffer; compute its complete chunks, or the ``last`` frames of the stream."""
        config, half = self.config, self.config.n_fft // 2
        self._buffer = np.concatenate([self._buffer, samples])
        if not self._open and self._buffer.size > half:
            self._buffer = np.concatenate([self._buffer[half:0:-1], self._buffer])
            self._open = True
        complete = (self._buffer.size - _span(1, config)) // config.chunk_samples + 1
        chunks = max(0, complete if last is None else -(-last // config.chunk_frames))
        x_cfm = _log_energy(self._buffer, chunks, config)
        self._buffer = self._buffer[chunks * config.chunk_samples :].copy()

        x_fm = x_cfm.reshape(-1, config.n_mels)[:last]
        for start in range(0, len(x_fm), config.chunk_frames):
            chunk_fm = x_fm[start : start + config.chunk_frames]
            self._maximum = max(self._maximum, float(chunk_fm.max()))
            chunk_fm[:] = _scaled(chunk_fm, self._maximum)
        self._frames += len(x_fm)
        return x_fm


def _checked(audio: np.ndarray, config: MelConfig, start: int) -> np.ndarray:
    """``audio`` as float32 ``[samples]``; ``start`` is the stream position of its first sample."""
    audio = np.asarray(audio)
    if audio.ndim != 1 or not np.issubdtype(audio.dtype, np.floating):
        raise UserError(
            "audio must be one channel of floating-point samples between -1 and 1 "
            f"(got shape {audio.shape}, {audio.dtype})"
        )
    with np.errstate(over="ignore"):  # what overflows float32 becomes infinite
        audio = audio.astype(np.float32, copy=False)
    good = np.abs(audio) <= _LOUDEST
    if not good.all():
        bad = int(np.argmin(good))
        at = (start + bad) / config.sample_rate
        raise UserError(
            f"the audio has the sample {audio[bad]:g} at {at:.3f} s; "
            "samples must be finite, between -1 and 1: repair or rescale the recording"
        )
    return audio


def _span(chunks: int, config: MelConfig) -> int:
    """Samples under the windows of ``chunks`` consecutive chunks."""
    return chunks * config.chunk_samples - config.hop_length + config.n_fft


def _log_energy(samples: np.ndarray, chunks: int, config: MelConfig) -> np.ndarray:
    """log10 of the mel energies of ``chunks`` chunks: float32 ``[chunks, chunk_frames, n_mels]``.

    ``samples`` starts at the left edge of the first window and holds at least ``_span(chunks)``.
    """
    out = np.empty((chunks, config.chunk_frames, config.n_mels), np.float32)
    for i in range(chunks):
        start = i * config.chunk_samples
        out[i] = _chunk_log_energy(samples[start : start + _span(1, config)], config)
    return out


def _chunk_log_energy(samples: np.ndarray, config: MelConfig) -> np.ndarray:
    """``samples`` ``[_span(1)]`` -> float32 ``[chunk_frames, n_mels]``.

    The transform is in double precision, because the quietest bands lie 80 dB below the loudest.
    """
    x = samples.astype(np.float64)
    windows = np.lib.stride_tricks.sliding_window_view(x, config.n_fft)[:: config.hop_length]
    spectrum = np.fft.rfft(windows * _window(config.n_fft))
    power_bf = (np.square(spectrum.real) + np.square(spectrum.imag)).T.astype(np.float32, order="C")
    # Each band sums a few neighbouring bins. That beats a matrix product, whose threads cost more
    # than they bring at this size and whose rounding depends on its shape.
    bins_mk, weights_mk = _filter_taps(config)
    energy_mf = np.einsum("mkf,mk->mf", power_bf[bins_mk], weights_mk)
    return np.log(np.maximum(energy_mf, _SMALLEST)).T * np.float32(1.0 / math.log(10.0))


def _scaled(x: np.ndarray, maximum: float) -> np.ndarray:
    """Whisper's range: clamp to 80 dB below ``maximum``, then ``(x + 4) / 4``."""
    return (np.maximum(x, np.float32(maximum - _RANGE)) + np.float32(4.0)) / np.float32(4.0)


@functools.lru_cache
def _window(n_fft: int) -> np.ndarray:
    """Periodic Hann window ``[n_fft]``, float64."""
    return 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(n_fft) / n_fft)


@functools.lru_cache
def _filter_taps(config: MelConfig) -> tuple[np.ndarray, np.ndarray]:
    """The filter bank without its zeros: the bins of each band and their weights.

    Returns int and float32 ``[n_mels, taps]``; short bands end with weights of zero.
    """
    filters_bm = mel_filters(config)
    taps = max(1, int(np.count_nonzero(filters_bm, axis=0).max()))
    first_m = np.minimum(np.argmax(filters_bm > 0, axis=0), len(filters_bm) - taps)
    bins_mk = first_m[:, None] + np.arange(taps)
    return bins_mk, np.take_along_axis(filters_bm.T, bins_mk, axis=1).astype(np.float32)


def mel_filters(config: MelConfig) -> np.ndarray:
    """Slaney filter bank, float64 ``[n_fft // 2 + 1, n_mels]``: triangles of equal area.

    Equal to ``librosa.filters.mel(...).T``; written out because importing librosa takes seconds.
    """
    bins = np.linspace(0.0, config.sample_rate / 2, config.n_fft // 2 + 1)
    top = _hz_to_mel(config.sample_rate / 2)
    edges = _mel_to_hz(np.linspace(0.0, top, config.n_mels + 2))
    left, centre, right = edges[:-2], edges[1:-1], edges[2:]
    rising = (bins[:, None] - left) / (centre - left)
    falling = (right - bins[:, None]) / (right - centre)
    return np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (right - left))


# Slaney's mel scale: linear below 1 kHz (200/3 Hz per mel), logarithmic above.
_MEL_HZ = 200.0 / 3.0
_KNEE_MEL = 1000.0 / _MEL_HZ
_LOG_STEP = math.log(6.4) / 27.0


def _hz_to_mel(hz: float) -> float:
    if hz < 1000.0:
        return hz / _MEL_HZ
    return _KNEE_MEL + math.log(hz / 1000.0) / _LOG_STEP


def _mel_to_hz(mel: np.ndarray) -> np.ndarray:
    return np.where(mel < _KNEE_MEL, mel * _MEL_HZ, 1000.0 * np.exp(_LOG_STEP * (mel - _KNEE_MEL)))
