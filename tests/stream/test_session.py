"""The state machine of Algorithm 3 against a scripted decoder that keeps its cache as a list."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from ai_jax.config import ModelConfig, from_dict, preset, to_dict
from ai_jax.stream.engine import Prediction
from ai_jax.stream.session import Session
from ai_jax.tokens import TextTokenizer

SILENT, RESPONSE, EOS, AUDIO = 300, 301, 302, 303


def _bytes():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tok = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tok


class ScriptedEngine:
    """Plays a decoder: answers chunk i with ``replies[i]`` (token ids) where there is one.

    Its cache is a list of what was appended, ("audio", i) standing for the frames of chunk i.
    """

    def __init__(self, replies, *, max_len=256, max_reply_tokens=16, prefix=()):
        data = to_dict(preset("model", "tiny", ModelConfig))
        data["stream"] |= {"max_len": max_len, "max_reply_tokens": max_reply_tokens}
        self.config = from_dict(ModelConfig, data)
        self.tokenizer = TextTokenizer(_bytes())
        self.chunk_tokens = self.config.stream.format.chunk(10)
        self.block = 11
        self.prefix = list(prefix)
        self.replies = replies
        self.slides = []

    def new_cache(self):
        return []

    def extend(self, cache, tokens, audio_nd=None):
        assert len(tokens) <= self.block
        cache = cache + [("audio", audio_nd) if t == AUDIO else t for t in tokens]
        assert len(cache) <= self.config.stream.max_len, "the cache overflowed"
        heard = [c for c in cache if isinstance(c, tuple)]
        chunk = heard[-1][1] if heard else None
        reply = self.replies.get(chunk)
        said = 0
        if RESPONSE in cache:
            said = len(cache) - 1 - max(i for i, c in enumerate(cache) if c == RESPONSE)
        text = EOS
        if reply is not None and cache[-1] != AUDIO and said < len(reply):
            text = reply[said]
        return Prediction(0.9 if reply is not None else 0.1, text), cache

    def slide(self, cache, prefix, drop):
        self.slides.append(drop)
        return cache[:prefix] + cache[prefix + drop :]


def drain(session):
    emitted = []
    while (e := session.step()) is not None:
        emitted.append(e)
        assert len(emitted) < 1000
    return emitted


def test_idle_until_something_is_heard():
    assert Session(ScriptedEngine({})).step() is None


def test_silent_chunks_and_a_reply():
    engine = ScriptedEngine({1: [65, 66]}, prefix=[7, 8, 9])
    session = Session(engine)
    emitted = []
    for i in range(3):
        session.hear(i)
        emitted += drain(session)
    assert [(e.kind, e.chunk, e.token) for e in emitted] == [
        ("silent", 0, SILENT),
        ("response", 1, RESPONSE),
        ("text", 1, 65),
        ("text", 1, 66),
        ("eos", 1, EOS),
        ("silent", 2, SILENT),
    ]
    # What the cache holds is the stream as Algorithm 2 writes it, but for the last decision.
    assert session._cache == [
        *[7, 8, 9],
        *[("audio", 0)] * 10, SILENT,
        *[("audio", 1)] * 10, RESPONSE, 65, 66, EOS,
        *[("audio", 2)] * 10,
    ]  # fmt: skip
    assert session.length == len(session._cache)


def test_chunks_that_arrive_during_a_reply_are_drained_at_its_end():
    engine = ScriptedEngine({0: [65, 66, 67]})
    session = Session(engine)
    session.hear(0)
    assert session.step().kind == "response"
    session.hear(1)
    session.hear(2)
    assert session.step().token == 65, "a reply goes on while the queue fills"
    emitted = drain(session)
    assert [e.kind for e in emitted] == ["text", "text", "eos", "silent"]
    assert emitted[-1].chunk == 2, "one decision for all that was queued"
    expected = [*[("audio", 0)] * 10, RESPONSE, 65, 66, 67, EOS]
    assert session._cache == expected + [("audio", 1)] * 10 + [("audio", 2)] * 10


def test_reply_is_bounded():
    engine = ScriptedEngine({0: [65] * 100}, max_reply_tokens=5)
    session = Session(engine)
    session.hear(0)
    emitted = drain(session)
    assert [e.kind for e in emitted] == ["response", *["text"] * 5, "eos"]


def test_threshold_trades_misses_for_false_alarms():
    for threshold, kind in ((0.05, "response"), (0.5, "silent"), (0.95, "silent")):
        session = Session(ScriptedEngine({}), threshold=threshold)
        session.hear(0)
        assert session.step().kind == kind


def test_text_waits_for_whole_characters():
    engine = ScriptedEngine({})
    engine.replies = {0: engine.tokenizer.encode("é")}
    session = Session(engine)
    session.hear(0)
    texts = [e.text for e in drain(session) if e.kind == "text"]
    assert texts == ["", "é"]


@settings(max_examples=30, deadline=None)
@given(
    replies=st.dictionaries(st.integers(0, 79), st.lists(st.integers(65, 90), max_size=14)),
    prefix=st.integers(0, 30),
    max_len=st.integers(90, 300),
    burst=st.integers(1, 4),
)
def test_a_stream_longer_than_the_cache_slides(replies, prefix, max_len, burst):
    """No overflow, the prefix stays, whole chunks go, and the books agree with the cache."""
    engine = ScriptedEngine(replies, max_len=max_len, prefix=range(1, prefix + 1))
    session = Session(engine)
    for i in range(0, 80, burst):
        for j in range(i, min(i + burst, 80)):
            session.hear(j)
        drain(session)
        cache = session._cache
        assert session.length == len(cache)
        assert sum(session._kept) + prefix == len(cache)
        assert cache[:prefix] == engine.prefix
        audio = [c[1] for c in cache if isinstance(c, tuple)]
        assert audio == [k for k in range(audio[0], audio[-1] + 1) for _ in range(10)]
    assert engine.slides and all(d > 0 for d in engine.slides)


def test_prefix_longer_than_a_block_is_fed_in_pieces():
    engine = ScriptedEngine({}, prefix=range(1, 26))
    assert Session(engine)._cache == list(range(1, 26))
