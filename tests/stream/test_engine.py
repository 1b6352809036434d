"""Streaming through the compiled steps against one teacher-forced pass, with the tiny model."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from ai_jax.audio.mel import log_mel
from ai_jax.config import ModelConfig, from_dict, to_dict
from ai_jax.errors import UserError
from ai_jax.model import omni
from ai_jax.stream.engine import Engine
from ai_jax.stream.listen import Listener, listen
from ai_jax.tokens import RELEASE


def configured(tiny, **stream) -> ModelConfig:
    data = to_dict(tiny)
    data["stream"] |= stream
    return from_dict(ModelConfig, data)


@pytest.fixture(scope="module")
def params(tiny):
    """Larger than the usual initialisation, so that decisions and texts vary."""
    return {k: v * 6 if v.ndim > 1 else v for k, v in omni.init_params(tiny, seed=3).items()}


@pytest.fixture(scope="module")
def engine(tiny, params, byte_tokenizer):
    config = configured(tiny, max_reply_tokens=5, max_len=200, instruction="Listen.")
    engine = Engine(config, params, byte_tokenizer)
    engine.warm_up()
    return engine


def noise(seconds: float, seed: int = 0) -> np.ndarray:
    """Bursts of different loudness: something different to hear in each chunk."""
    rng = np.random.default_rng(seed)
    audio = rng.standard_normal(int(16000 * seconds)).astype(np.float32)
    return audio * np.repeat(rng.uniform(0.001, 0.3, len(audio) // 800 + 1), 800)[: len(audio)]


def middle_threshold(engine, audio) -> float:
    """A threshold that some chunks reach and some do not, with room around it."""
    p = np.sort([r.p_response for r in listen(engine, [audio], threshold=0.999999)])
    gaps = np.diff(p)[2:-2]
    i = int(np.argmax(gaps)) + 2
    return float((p[i] + p[i + 1]) / 2)


def teacher_forced(engine, params, audio, results):
    """Probabilities and greedy texts of one pass over the whole stream with its own tokens."""
    config = engine.config
    fmt = config.stream.format
    tokens, decisions, texts = list(engine.prefix), [], []
    for r in results:
        tokens += engine.chunk_tokens
        decisions.append(len(tokens) - 1)
        texts += [len(tokens) + i for i in range(len(r.tokens) - 1)]
        tokens += r.tokens
    mel = log_mel(audio, config.mel).reshape(1, len(results), 40, -1)
    hidden = omni.forward(config, omni.stack_layers(params), jnp.array([tokens]), mel, remat=False)
    logits = np.array(omni.unembed(config, params, hidden)[0])
    p = 1 / (1 + np.exp(logits[decisions, fmt.silent] - logits[decisions, fmt.response]))
    legal = [i for i in range(config.text.vocab_size) if engine.tokenizer.token_bytes(i)]
    legal.append(fmt.eos)
    greedy = [legal[int(np.argmax(logits[j, legal]))] for j in texts]
    return p, greedy


@pytest.mark.parametrize("seed", [0, 1])
def test_streaming_equals_one_pass(engine, params, seed):
    audio = noise(4.0, seed)
    threshold = middle_threshold(engine, audio)
    results = list(listen(engine, [audio], threshold=threshold))
    assert [r.chunk for r in results] == list(range(10))
    assert [r.t for r in results] == pytest.approx([0.4 * (i + 1) for i in range(10)])
    decisions = {r.decision for r in results}
    assert decisions == {"silent", "response"}, "the test needs both decisions"
    p, greedy = teacher_forced(engine, params, audio, results)
    np.testing.assert_allclose([r.p_response for r in results], p, atol=1e-5)
    assert [r.decision == "response" for r in results] == list(p >= threshold)
    emitted = [t for r in results for t in r.tokens[1:]]
    limit = engine.config.stream.max_reply_tokens
    cut = [i == limit for r in results for i in range(len(r.tokens) - 1)]
    fmt = engine.config.stream.format
    assert emitted == [fmt.eos if c else g for g, c in zip(greedy, cut, strict=True)]


def test_pieces_of_any_size_give_the_same(engine):
    audio = noise(3.3)
    whole = list(listen(engine, [audio], threshold=0.4))
    for size in (1000, 6400, 7777):
        pieces = [audio[i : i + size] for i in range(0, len(audio), size)]
        assert list(listen(engine, pieces, threshold=0.4)) == whole


@pytest.mark.parametrize(("samples", "chunks"), [(1, 1), (6399, 1), (6400, 1), (6401, 2)])
def test_a_short_or_partial_chunk_is_filled_with_silence(engine, samples, chunks):
    results = list(listen(engine, [noise(1.0)[:samples]]))
    assert [r.chunk for r in results] == list(range(chunks))


def test_a_chunk_is_decided_2_5_ms_after_its_last_sample(engine):
    listener = Listener(engine)
    audio = noise(1.0)
    assert not list(listener.push(audio[:6439]))
    assert [r.chunk for r in listener.push(audio[6439:6440])] == [0]


def test_one_compilation_per_shape_and_a_bounded_cache(engine):
    """A stream several times longer than the cache slides, compiles nothing and keeps its prefix"""
    before = engine.compilations
    listener = Listener(engine, threshold=0.45)
    lengths = []
    for i in range(12):
        for result in listener.push(noise(2.0, seed=i)):
            assert 0 < result.p_response < 1
            lengths.append(listener.session.length)
    assert engine.compilations == before
    assert max(lengths) <= engine.config.stream.max_len
    assert any(b < a for a, b in itertools.pairwise(lengths)), "it must have slid"
    assert int(listener.session._cache.length_b[0]) == listener.session.length


def test_replies_hold_text_only(engine):
    """No control token inside a reply, whatever the logits say."""
    fmt = engine.config.stream.format
    for r in listen(engine, [noise(8.0, seed=5)], threshold=0.01):
        assert r.tokens[0] == fmt.response
        assert r.tokens[-1] == fmt.eos
        assert all(engine.tokenizer.token_bytes(t) for t in r.tokens[1:-1])


def test_release_format_feeds_thirteen_tokens_a_chunk(tiny, params, byte_tokenizer):
    ids = {"silent": 300, "response": 301, "eos": 302, "audio": 303, "pad": 304}
    fmt = {"name": "release", "prefix_open": [310, 311], "prefix_close": [302], **ids}
    fmt |= {"chunk_open": [312], "chunk_close": [313], "emotions": [65, 66, 67, 68, 69, 70]}
    config = configured(tiny, format=fmt, max_len=200)
    engine = Engine(config, params, byte_tokenizer)
    assert engine.block == len(RELEASE.chunk(10)) + 1 == 13
    results = list(listen(engine, [noise(2.0)], threshold=0.01))
    p, _ = teacher_forced(engine, params, noise(2.0), results)
    np.testing.assert_allclose([r.p_response for r in results], p, atol=1e-5)


def test_a_cache_too_short_for_a_reply_is_refused(tiny, params, byte_tokenizer):
    with pytest.raises(UserError, match="max_len must be at least"):
        Engine(configured(tiny, max_len=30), params, byte_tokenizer)


def test_a_format_beyond_the_vocabulary_is_refused(tiny, params, byte_tokenizer):
    fmt = {"name": "paper", "silent": 400, "response": 301, "eos": 302, "audio": 303, "pad": 304}
    with pytest.raises(UserError, match="token 400"):
        Engine(configured(tiny, format=fmt), params, byte_tokenizer)
