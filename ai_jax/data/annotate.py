"""From a timeline to tokens and training targets (the paper's Algorithm 2), and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ai_jax.errors import UserError
from ai_jax.tokens import StreamFormat, TextTokenizer

MASK = -1


class Reply(NamedTuple):
    """A response with its emotion tag (None: no tag)."""

    text: str
    emotion: str | None = None


Timeline = Sequence[tuple[int, str | Reply]]


class Annotated(NamedTuple):
    """One stream as tokens, all int32 [tokens].

    The targets are aligned with the tokens: where it is not ``MASK``, ``y[j] == tokens[j]`` and
    position j - 1 has to predict it. At most one of the two supervises a position.
    """

    tokens: np.ndarray
    stream_target: np.ndarray
    lm_target: np.ndarray


def annotate(
    format: StreamFormat,
    tokenizer: TextTokenizer,
    n_chunks: int,
    chunk_tokens: int,
    timeline: Timeline,
    instruction: str = "",
) -> Annotated:
    """Tokens, decision targets and text targets of a stream (Algorithm 2).

    n_chunks: chunks of the stream (T). chunk_tokens: audio positions of each. timeline: (chunk,
    response), chunks 1-based and strictly increasing; a response is its text, or a ``Reply`` where
    it carries an emotion tag. Text is never read as control tokens. Raises UserError where the
    timeline does not fit the stream or the format cannot carry a response.
    """
    replies = _check(timeline, n_chunks)
    prefix = format.prefix(tokenizer.encode(instruction))
    chunk = format.chunk(chunk_tokens)
    tokens = list(prefix)
    stream_target = [MASK] * len(prefix)
    lm_target = [MASK] * len(prefix)
    for t in range(1, n_chunks + 1):
        reply = replies.get(t)
        decision = format.silent if reply is None else format.response
        text = [] if reply is None else [*_encode(format, tokenizer, reply), format.eos]
        tokens += [*chunk, decision, *text]
        stream_target += [*[MASK] * len(chunk), decision, *[MASK] * len(text)]
        lm_target += [*[MASK] * len(chunk), MASK, *text]
    return Annotated(*(np.asarray(x, np.int32) for x in (tokens, stream_target, lm_target)))


def timeline_of(
    format: StreamFormat, tokenizer: TextTokenizer, tokens: Sequence[int] | np.ndarray
) -> tuple[tuple[int, str | Reply], ...]:
    """The timeline that ``tokens`` (without padding) spell: the inverse of :func:`annotate`.

    Raises UserError where the tokens are no stream of this format.
    """
    tokens = [int(token) for token in tokens]
    timeline: list[tuple[int, str | Reply]] = []
    # Text never encodes to the audio placeholder, so the first one lies in the first chunk.
    at = tokens.index(format.audio) if format.audio in tokens else len(tokens)
    n_audio = 0
    while tokens[at + n_audio : at + n_audio + 1] == [format.audio]:
        n_audio += 1
    chunk = format.chunk(n_audio)
    at -= len(format.chunk_open) if n_audio else 0
    t = 0
    while at < len(tokens):
        t += 1
        if tokens[at : at + len(chunk)] != chunk:
            raise UserError(f"position {at} does not begin a chunk of the '{format.name}' format")
        at += len(chunk)
        decision = tokens[at] if at < len(tokens) else None
        if decision not in (format.silent, format.response):
            raise UserError(f"position {at} holds {decision}, which is no decision")
        at += 1
        if decision == format.response:
            if format.eos not in tokens[at:]:
                raise UserError(f"the reply at position {at} does not end")
            end = tokens.index(format.eos, at)
            timeline.append((t, _decode(format, tokenizer, tokens[at:end])))
            at = end + 1
    return tuple(timeline)


def _check(timeline: Timeline, n_chunks: int) -> dict[int, str | Reply]:
    previous = 0
    for chunk, _ in timeline:
        if not previous < chunk <= n_chunks:
            raise UserError(
                f"a timeline's chunks must increase and lie in 1..{n_chunks} (got {chunk} after "
                f"{previous})"
            )
        previous = chunk
    return dict(timeline)


def _encode(format: StreamFormat, tokenizer: TextTokenizer, reply: str | Reply) -> list[int]:
    text, emotion = Reply(reply) if isinstance(reply, str) else reply
    ids = tokenizer.encode(text)
    if emotion is None and ids and format.emotion(ids[0]):
        raise UserError(f"the reply {text!r} begins with a token that reads as an emotion tag")
    return format.reply(ids, emotion)


def _decode(format: StreamFormat, tokenizer: TextTokenizer, ids: Sequence[int]) -> str | Reply:
    emotion = format.emotion(ids[0]) if ids else None
    return tokenizer.decode(ids) if emotion is None else Reply(tokenizer.decode(ids[1:]), emotion)
