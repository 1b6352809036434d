"""Log-mel features, one causal definition for training and streaming (NumPy only)."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class MelConfig:
    """Whisper's log-mel: 16 kHz, 25 ms Hann windows every 10 ms."""

    sample_rate: int = 16000
    n_fft: int = 400
    hop_length: int = 160
    n_mels: int = 128
    normalization: Literal["stream", "clip"] = "stream"
    floor: float = -2.0
