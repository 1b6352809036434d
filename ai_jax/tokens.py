"""How a stream becomes tokens: control tokens, the two stream formats, and the text tokenizer.

A stream is ``prefix, (chunk, decision [, reply])*``. Training, streaming and evaluation all read
these pieces from one :class:`StreamFormat`, so that none can disagree with another.
"""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer

from ai_jax.errors import UserError

EMOTIONS = ("happy", "sad", "angry", "surprise", "normal", "urgent")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamFormat:
    """Token ids that frame a stream.

    silent, response: the two legal tokens at a decision. eos: ends a reply. audio: placeholder
    whose embedding is replaced by an audio frame. pad: fills a batch.
    prefix_open/prefix_close: around the instruction. chunk_open/chunk_close: around the audio
    frames of each chunk. emotions: ids of tags that may open a reply, in the order of ``EMOTIONS``.
    """

    name: Literal["paper", "release"] = "paper"
    silent: int = 151665
    response: int = 151666
    eos: int = 151645
    audio: int = 151646
    pad: int = 151643
    prefix_open: tuple[int, ...] = ()
    prefix_close: tuple[int, ...] = ()
    chunk_open: tuple[int, ...] = ()
    chunk_close: tuple[int, ...] = ()
    emotions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len({self.silent, self.response, self.eos, self.audio}) != 4:
            raise UserError("silent, response, eos and audio must be four different token ids")
        if self.emotions and len(self.emotions) != len(EMOTIONS):
            raise UserError(f"emotions must list {len(EMOTIONS)} ids: {', '.join(EMOTIONS)}")

    def prefix(self, instruction: Sequence[int]) -> list[int]:
        """Tokens before the first chunk."""
        return [*self.prefix_open, *instruction, *self.prefix_close]

    def chunk(self, n_audio: int) -> list[int]:
        """Tokens of one chunk with ``n_audio`` audio frames; its last position decides."""
        return [*self.chunk_open, *[self.audio] * n_audio, *self.chunk_close]

    def reply(self, text: Sequence[int], emotion: str | None = None) -> list[int]:
        """Tokens between ``response`` and ``eos``, for training: the text, with its tag if any.

        Raises UserError where the text holds a token that would end the reply, or the tag is
        unknown to this format.
        """
        if self.eos in text:
            raise UserError("the reply contains the token that ends a reply; encode it as text")
        if emotion is None:
            return list(text)
        if emotion not in EMOTIONS or not self.emotions:
            known = ", ".join(EMOTIONS) if self.emotions else "none in this stream format"
            raise UserError(f"unknown emotion '{emotion}' (known: {known})")
        return [self.emotions[EMOTIONS.index(emotion)], *text]

    def emotion(self, token: int) -> str | None:
        """Name of the tag if ``token``, the first of a reply, is one, else None."""
        return EMOTIONS[self.emotions.index(token)] if token in self.emotions else None


PAPER = StreamFormat()
RELEASE = StreamFormat(
    name="release",
    silent=151605,  # KEEP_SILENCE
    response=151644,  # TEXT_BEGIN
    eos=151643,  # TEXT_END
    audio=151646,
    pad=151608,
    prefix_open=(151609, 151611, 151644, 151644),  # ONLINE, ENGLISH, SYSTEM, TEXT_BEGIN
    prefix_close=(151643,),
    chunk_open=(151647,),  # AUDIO_BEGIN
    chunk_close=(151602,),  # ASSISTANT
    emotions=(151614, 151615, 151616, 151617, 151618, 151619),
)


class TextTokenizer:
    """Text <-> ids. Special tokens are never parsed out of text, so no text can forge a control."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = True
        self._bytes = {c: b for b, c in _byte_alphabet().items()}

    def __reduce__(self):
        # A pickled Tokenizer forgets encode_special_tokens: the constructor sets it again.
        return TextTokenizer, (self._tokenizer,)

    @classmethod
    def from_file(cls, path: str | Path) -> TextTokenizer:
        """Load ``tokenizer.json`` (byte-level BPE). Raises UserError if it cannot be read."""
        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as e:
            raise UserError(f"cannot read the tokenizer {path}: {e}") from e

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        stream = self.stream()
        return "".join([*map(stream.push, ids), stream.flush()])

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one text token stands for; empty for special and unknown ids."""
        piece = self._tokenizer.id_to_token(token)
        if piece is None or any(c not in self._bytes for c in piece):
            return b""
        added = self._tokenizer.get_added_tokens_decoder().get(token)
        return b"" if added is not None else bytes(self._bytes[c] for c in piece)

    def stream(self) -> TextStream:
        return TextStream(self)


class TextStream:
    """Incremental detokenisation: text comes out as soon as its characters are complete."""

    def __init__(self, tokenizer: TextTokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Text completed by ``token``; bytes of an unfinished character wait for the next one."""
        return self._utf8.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """What an ended reply leaves: a cut-off character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)


def _byte_alphabet() -> dict[int, str]:
    """The printable stand-ins that byte-level BPE uses for the 256 byte values."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in keep]
    return {b: chr(b) for b in keep} | {b: chr(256 + i) for i, b in enumerate(rest)}
