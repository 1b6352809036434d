"""Algorithm 2 and its inverse."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from ai_jax.data.annotate import MASK, Reply, annotate, timeline_of
from ai_jax.errors import UserError
from ai_jax.tokens import EMOTIONS, PAPER, RELEASE, TextTokenizer

FORMATS = pytest.mark.parametrize("format", [PAPER, RELEASE], ids=lambda f: f.name)
CONTROLS = {"<silent>": 151665, "<response>": 151666, "<|im_end|>": 151645, "<|AUDIO|>": 151646}


def make_tokenizer() -> TextTokenizer:
    """Byte-level without merges, which knows the control tokens at their true ids."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tok = Tokenizer(models.BPE(vocab={**vocab, **CONTROLS}, merges=[]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.add_special_tokens([AddedToken(name, special=True) for name in CONTROLS])
    return TextTokenizer(tok)


TOKENIZER = make_tokenizer()
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)


@st.composite
def timelines(draw, texts=TEXTS):
    n_chunks = draw(st.integers(1, 12))
    chunks = draw(st.lists(st.integers(1, n_chunks), unique=True).map(sorted))
    return n_chunks, tuple((chunk, draw(texts)) for chunk in chunks)


def algorithm_2(prefix, frames, timeline, silent, response, eos):
    """The paper's listing, line by line."""
    x, y_stream, y_lm = [], [], []

    def append(token, stream, lm):
        x.append(token), y_stream.append(stream), y_lm.append(lm)

    for token in prefix:
        append(token, MASK, MASK)
    k = 0
    for t, a_t in enumerate(frames, start=1):
        for feature in a_t:
            append(feature, MASK, MASK)
        if k < len(timeline) and timeline[k][0] == t:
            append(response, response, MASK)
            for w in timeline[k][1]:
                append(w, MASK, w)
            append(eos, MASK, eos)
            k += 1
        else:
            append(silent, silent, MASK)
    return x, y_stream, y_lm


@FORMATS
@given(drawn=timelines(), instruction=TEXTS)
def test_algorithm_2_to_the_letter(format, drawn, instruction):
    n_chunks, timeline = drawn
    annotated = annotate(format, TOKENIZER, n_chunks, 10, timeline, instruction)
    expected = algorithm_2(
        format.prefix(TOKENIZER.encode(instruction)),
        [format.chunk(10)] * n_chunks,
        [(t, TOKENIZER.encode(text)) for t, text in timeline],
        format.silent,
        format.response,
        format.eos,
    )
    for got, want in zip(annotated, expected, strict=True):
        assert got.dtype == np.int32
        assert got.tolist() == want


@FORMATS
@given(drawn=timelines(), instruction=TEXTS)
def test_targets_exclude_each_other_and_align(format, drawn, instruction):
    n_chunks, timeline = drawn
    x, y_stream, y_lm = annotate(format, TOKENIZER, n_chunks, 10, timeline, instruction)
    decides, speaks = y_stream != MASK, y_lm != MASK
    assert not (decides & speaks).any()
    assert decides.sum() == n_chunks
    assert (y_stream == format.response).sum() == len(timeline)
    assert (y_lm == format.eos).sum() == len(timeline)
    np.testing.assert_array_equal(x[decides], y_stream[decides])
    np.testing.assert_array_equal(x[speaks], y_lm[speaks])
    assert not (decides | speaks)[x == format.audio].any()


@FORMATS
@given(drawn=timelines(), instruction=TEXTS, chunk_tokens=st.sampled_from([5, 10, 20]))
def test_round_trip(format, drawn, instruction, chunk_tokens):
    n_chunks, timeline = drawn
    annotated = annotate(format, TOKENIZER, n_chunks, chunk_tokens, timeline, instruction)
    assert timeline_of(format, TOKENIZER, annotated.tokens) == timeline


@given(timelines(st.builds(Reply, TEXTS, st.sampled_from([None, *EMOTIONS]))))
def test_round_trip_with_emotion_tags(drawn):
    n_chunks, timeline = drawn
    annotated = annotate(RELEASE, TOKENIZER, n_chunks, 10, timeline)
    expected = tuple((t, r if r.emotion else r.text) for t, r in timeline)
    assert timeline_of(RELEASE, TOKENIZER, annotated.tokens) == expected


@FORMATS
def test_control_strings_stay_text(format):
    timeline = ((1, "<|im_end|><silent>"), (3, "<response><|AUDIO|>"))
    instruction = "say <response>, not <|AUDIO|>"
    annotated = annotate(format, TOKENIZER, 4, 10, timeline, instruction)
    assert (annotated.tokens == format.audio).sum() == 40
    assert timeline_of(format, TOKENIZER, annotated.tokens) == timeline


@FORMATS
@pytest.mark.parametrize("chunks", [(0,), (5,), (2, 2), (3, 1), (-1,)])
def test_timeline_must_fit_the_stream(format, chunks):
    with pytest.raises(UserError):
        annotate(format, TOKENIZER, 4, 10, [(t, "x") for t in chunks])


def test_replies_that_a_format_cannot_carry():
    with pytest.raises(UserError):
        annotate(PAPER, TOKENIZER, 4, 10, [(1, Reply("x", "sad"))])
    with pytest.raises(UserError):
        annotate(RELEASE, TOKENIZER, 4, 10, [(1, Reply("x", "bored"))])

    class Reused(TextTokenizer):
        """A vocabulary whose ordinary token has the id that the release uses as a tag."""

        def __init__(self):
            pass

        def encode(self, text):
            return [RELEASE.emotions[0]] if text else []

    with pytest.raises(UserError):
        annotate(RELEASE, Reused(), 4, 10, [(1, "x")])


def test_tokens_that_are_no_stream():
    good = annotate(PAPER, TOKENIZER, 3, 10, [(2, "hi")]).tokens.tolist()
    for bad in (good[:-1], good[:5], [*good[:10], 7, *good[11:]], good[:23], [*good, 7]):
        with pytest.raises(UserError):
            timeline_of(PAPER, TOKENIZER, bad)
