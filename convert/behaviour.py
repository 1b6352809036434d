"""Two models run on the same sound: how far apart are their logits and their words?"""

from __future__ import annotations

import dataclasses
import importlib.resources
import time
from pathlib import Path

import numpy as np

from ai_jax.audio import io
from ai_jax.audio.mel import log_mel
from ai_jax.config import ModelConfig
from ai_jax.convert import runners
from ai_jax.convert.runners import Choice, Clip, Implementation, Output
from ai_jax.convert.source import Source
from ai_jax.errors import UserError

FORCED_CHUNKS = 12
REPLY_TOKENS = 8
_REPLY_EVERY = 4  # chunks, in the streams whose tokens are given


@dataclasses.dataclass(frozen=True)
class ClipDiff:
    """Logits of A and B on one stream whose tokens are given, at each of ``positions``.

    relative: ``max_abs_diff`` over the largest logit of A. kl: mean KL(A || B) in nats. top1: share
    of positions at which both find the same token likeliest.
    """

    clip: str
    positions: int
    max_abs_diff: float
    relative: float
    kl: float
    top1: float


@dataclasses.dataclass(frozen=True)
class GreedyDiff:
    """Greedy decoding of one stream: the tokens that A and B chose.

    equal: how many are the same before the first difference, which is in ``chunk`` (None: there is
    no difference). margin: by how much A preferred its token there to the next best one.
    """

    chunks: int
    a: tuple[int, ...]
    b: tuple[int, ...]
    equal: int
    chunk: int | None
    margin: float | None


@dataclasses.dataclass(frozen=True)
class Behaviour:
    """What running both models showed. a, b: the implementations. scale: largest logit of A."""

    a: Implementation
    b: Implementation
    clips: tuple[ClipDiff, ...]
    greedy: GreedyDiff
    scale: float
    seconds_a: float
    seconds_b: float

    @property
    def relative(self) -> float:
        return max(clip.relative for clip in self.clips)


# The sound and the tokens.


@dataclasses.dataclass(frozen=True)
class Material:
    """What both models read: clips whose tokens are given, and the mel of the greedy stream."""

    clips: tuple[Clip, ...]
    mel_cfm: np.ndarray


def material(config: ModelConfig, audio: str | Path | None, chunks: int, seed: int) -> Material:
    """Noise and a recording (None: spoken words of the package), repeated to ``chunks`` chunks.

    Raises UserError if ``audio`` is unreadable, or so many chunks do not fit the model's positions.
    """
    room = config.text.max_position_embeddings
    fits = max(chunks, 0)
    while fits and runners.stream_tokens(config, fits, REPLY_TOKENS) > room:
        fits -= 1
    if not 0 < chunks <= fits:
        raise UserError(f"chunks must lie between 1 and {max(fits, 1)} (got {chunks})")
    name, samples = _recording(audio)
    rng = np.random.default_rng(seed)
    noise = (0.1 * rng.standard_normal(FORCED_CHUNKS * config.chunk_samples)).astype(np.float32)
    recording = _chunks(config, samples, max(chunks, FORCED_CHUNKS))
    clips = (
        _forced(config, "noise", _chunks(config, noise, FORCED_CHUNKS), rng),
        _forced(config, name, recording[:FORCED_CHUNKS], rng),
    )
    return Material(clips, recording[:chunks])


def _recording(audio: str | Path | None) -> tuple[str, np.ndarray]:
    if audio is not None:
        return Path(audio).name, io.read(audio)
    folder = importlib.resources.files("ai_jax.assets.demo")
    words = []
    for name in sorted(p.name for p in folder.iterdir() if p.name.endswith(".flac")):
        with importlib.resources.as_file(folder / name) as path:
            words.append(io.read(path))
    return "spoken words", np.concatenate(words)


def _chunks(config: ModelConfig, samples: np.ndarray, count: int) -> np.ndarray:
    """Mel frames [count, chunk_frames, mels] of the samples, over and over."""
    mel_fm = log_mel(np.resize(samples, count * config.chunk_samples), config.mel)
    return mel_fm.reshape(count, config.audio.chunk_frames, -1)


def _forced(config: ModelConfig, name: str, mel_cfm: np.ndarray, rng: np.random.Generator) -> Clip:
    """Instruction, chunks with their decisions, and a reply now and then, in random text."""
    fmt = config.stream.format
    control = [fmt.silent, fmt.response, fmt.eos, fmt.audio, fmt.pad]
    text = np.setdiff1d(np.arange(config.text.vocab_size), control)
    tokens = fmt.prefix(rng.choice(text, 4).tolist())
    for chunk in range(len(mel_cfm)):
        tokens += runners.chunk_tokens(config)
        if chunk % _REPLY_EVERY:
            tokens.append(fmt.silent)
        else:
            tokens += [fmt.response, *rng.choice(text, 4).tolist(), fmt.eos]
    return Clip(name, tuple(tokens), mel_cfm)


# The comparison.


def run_both(
    a: Source,
    b: Source,
    implementations: tuple[Implementation, Implementation],
    given: Material,
) -> Behaviour:
    """Run A, let it go, run B, and compare."""
    outputs, seconds = [], []
    for source, implementation in zip((a, b), implementations, strict=True):
        start = time.monotonic()
        stream = (given.clips, given.mel_cfm, REPLY_TOKENS)
        outputs.append(runners.run(source, implementation, *stream))
        seconds.append(round(time.monotonic() - start, 1))
    differences = zip(given.clips, *(output.logits for output in outputs), strict=True)
    return Behaviour(
        *implementations,
        clips=tuple(_clip_diff(clip, x, y) for clip, x, y in differences),
        greedy=_greedy_diff(len(given.mel_cfm), *(output.choices for output in outputs)),
        scale=_scale(outputs[0]),
        seconds_a=seconds[0],
        seconds_b=seconds[1],
    )


def _scale(output: Output) -> float:
    return max(float(np.abs(logits_tv).max()) for logits_tv in output.logits)


def _clip_diff(clip: Clip, a_tv: np.ndarray, b_tv: np.ndarray) -> ClipDiff:
    gap = float(np.abs(a_tv - b_tv).max())
    largest = float(np.abs(a_tv).max())
    if not np.isfinite(gap):
        gap = np.inf  # NaN: what cannot be compared is not equal
    if np.isfinite(largest) and largest:
        relative = gap / largest
    else:
        relative = 0.0 if gap == 0 else np.inf
    return ClipDiff(
        clip=clip.name,
        positions=len(a_tv),
        max_abs_diff=gap,
        relative=relative,
        kl=float(np.mean([_kl(x, y) for x, y in zip(a_tv, b_tv, strict=True)])),
        top1=float(np.mean(a_tv.argmax(1) == b_tv.argmax(1))),
    )


def _kl(a_v: np.ndarray, b_v: np.ndarray) -> float:
    log_p, log_q = (x - _logsumexp(x) for x in (a_v.astype(np.float64), b_v.astype(np.float64)))
    return float(np.sum(np.exp(log_p) * (log_p - log_q)))


def _logsumexp(x: np.ndarray) -> float:
    top = x.max()
    return top + np.log(np.exp(x - top).sum())


def _greedy_diff(chunks: int, a: tuple[Choice, ...], b: tuple[Choice, ...]) -> GreedyDiff:
    pairs = zip(a, b, strict=False)
    same = [(x.chunk, x.token) == (y.chunk, y.token) for x, y in pairs]
    equal = same.index(False) if False in same else len(same)
    first = a[equal] if equal < min(len(a), len(b)) else None
    return GreedyDiff(
        chunks=chunks,
        a=tuple(choice.token for choice in a),
        b=tuple(choice.token for choice in b),
        equal=equal,
        chunk=None if first is None else first.chunk,
        margin=None if first is None else first.margin,
    )
