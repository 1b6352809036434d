"""Stream formats and incremental detokenisation."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ai_jax.errors import UserError
from ai_jax.tokens import EMOTIONS, PAPER, RELEASE, StreamFormat, TextTokenizer


def test_chunk_and_prefix_of_both_formats():
    assert PAPER.prefix([7, 8]) == [7, 8]
    assert PAPER.chunk(10) == [151646] * 10
    assert RELEASE.prefix([7]) == [151609, 151611, 151644, 151644, 7, 151643]
    assert RELEASE.chunk(10) == [151647, *[151646] * 10, 151602]
    assert len(RELEASE.chunk(10)) + 1 == 13  # with the previous token, as the release feeds it


def test_reply_with_emotion():
    assert RELEASE.reply([5, 6], "urgent") == [151619, 5, 6]
    assert [RELEASE.emotion(t) for t in RELEASE.emotions] == list(EMOTIONS)
    assert RELEASE.emotion(5) is None
    with pytest.raises(UserError, match="unknown emotion"):
        PAPER.reply([5], "urgent")
    with pytest.raises(UserError, match="ends a reply"):
        PAPER.reply([5, PAPER.eos])


def test_colliding_ids_are_refused():
    with pytest.raises(UserError, match="four different"):
        StreamFormat(silent=1, response=1)


@given(st.text())
def test_decode_inverts_encode(byte_tokenizer, text):
    assert byte_tokenizer.decode(byte_tokenizer.encode(text)) == text


@given(st.text(min_size=1))
def test_stream_never_emits_half_a_character(byte_tokenizer, text):
    stream = byte_tokenizer.stream()
    pieces = [stream.push(i) for i in byte_tokenizer.encode(text)]
    assert "".join(pieces) + stream.flush() == text
    assert all("�" not in p for p in pieces) or "�" in text


def test_cut_off_character_is_replaced_once(byte_tokenizer):
    stream = byte_tokenizer.stream()
    first_byte = byte_tokenizer.encode("é")[0]
    assert stream.push(first_byte) == ""
    assert stream.flush() == "�"


def test_text_cannot_forge_a_control_token(byte_tokenizer):
    ids = byte_tokenizer.encode("say <silent> now")
    assert byte_tokenizer.decode(ids) == "say <silent> now"
    assert all(byte_tokenizer.token_bytes(i) for i in ids)
    assert byte_tokenizer.token_bytes(256) == b""  # the special token itself is no text
    assert byte_tokenizer.token_bytes(10_000) == b""


def test_a_pickled_tokenizer_still_reads_control_strings_as_text(byte_tokenizer):
    copy = pickle.loads(pickle.dumps(byte_tokenizer))
    assert copy.encode("<silent>") == byte_tokenizer.encode("<silent>") != [256]


def test_missing_tokenizer(tmp_path):
    with pytest.raises(UserError, match="cannot read the tokenizer"):
        TextTokenizer.from_file(tmp_path / "tokenizer.json")
