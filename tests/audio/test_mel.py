"""Log-mel: the same bits for any split, causality, parity with Whisper, odd input."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ai_jax.audio.mel import MelConfig, StreamingLogMel, log_mel, mel_filters
from ai_jax.errors import UserError

CONFIG = MelConfig(n_mels=80)
CHUNK = CONFIG.chunk_samples  # 6,400 samples
COMPLETE = CHUNK + CONFIG.lookahead  # samples after which the first chunk is complete


def noise(samples: int, seed: int = 0) -> np.ndarray:
    """Noise whose loudness changes every 250 ms, so that the running maximum keeps moving."""
    rng = np.random.default_rng(seed)
    level_db = np.repeat(rng.uniform(-70, -5, samples // 4000 + 1), 4000)[:samples]
    return (rng.standard_normal(samples) * 10 ** (level_db / 20)).astype(np.float32)


def in_pieces(audio: np.ndarray, cuts: list[int], config: MelConfig) -> np.ndarray:
    """Features of ``audio`` pushed in the pieces between ``cuts``."""
    stream = StreamingLogMel(config)
    outputs = [stream.push(piece) for piece in np.split(audio, cuts)]
    return np.concatenate([*outputs, stream.flush()])


def assert_same_bits(a: np.ndarray, b: np.ndarray) -> None:
    assert a.shape == b.shape and a.dtype == b.dtype == np.float32
    assert a.tobytes() == b.tobytes()


@given(
    samples=st.integers(0, 40_000),
    cuts=st.lists(st.integers(0, 40_000), max_size=30),
    seed=st.integers(0, 2**32 - 1),
    chunk_frames=st.sampled_from([1, 7, 20, 40, 80]),
    n_mels=st.sampled_from([80, 128]),
)
@settings(max_examples=60, deadline=None)
def test_any_split_gives_the_same_bits(samples, cuts, seed, chunk_frames, n_mels):
    config = MelConfig(n_mels=n_mels, chunk_frames=chunk_frames)
    audio = noise(samples, seed)
    whole = log_mel(audio, config)
    assert whole.shape == (-(-samples // 160), n_mels)
    assert_same_bits(in_pieces(audio, sorted(cuts), config), whole)


@pytest.mark.parametrize("piece", [1, 100, 6400, 30_011])
def test_equal_pieces_give_the_same_bits(piece):
    audio = noise(30_011)
    cuts = list(range(piece, audio.size, piece))
    assert_same_bits(in_pieces(audio, cuts, CONFIG), log_mel(audio, CONFIG))


@pytest.mark.parametrize(
    "samples", [0, 1, 199, 200, 201, 202, CHUNK - 1, CHUNK, COMPLETE - 1, COMPLETE, COMPLETE + 1]
)
def test_lengths_around_the_edges(samples):
    audio = noise(samples)
    features = log_mel(audio, CONFIG)
    assert features.shape == (-(-samples // 160), 80)
    assert np.isfinite(features).all()
    assert_same_bits(in_pieces(audio, list(range(1, samples, 61)), CONFIG), features)


def test_a_chunk_comes_out_with_the_last_sample_that_it_needs():
    stream = StreamingLogMel(CONFIG)
    assert len(stream.push(noise(COMPLETE - 1))) == 0
    assert len(stream.push(np.zeros(1, np.float32))) == 40
    assert len(stream.push(noise(CHUNK - 1))) == 0
    assert len(stream.push(np.zeros(2 * CHUNK + 1, np.float32))) == 120
    assert CONFIG.lookahead == 40


@given(chunk=st.integers(0, 4), seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_the_future_does_not_change_the_past(chunk, seed):
    audio = noise(5 * CHUNK + COMPLETE, seed)
    changed = audio.copy()
    known = chunk * CHUNK + COMPLETE
    changed[known:] = 1.0
    frames = 40 * (chunk + 1)
    a, b = log_mel(audio, CONFIG), log_mel(changed, CONFIG)
    assert_same_bits(a[:frames], b[:frames])
    assert not np.array_equal(a[frames:], b[frames:])


def test_flush_leaves_a_fresh_stream():
    stream = StreamingLogMel(CONFIG)
    loud, quiet = noise(20_000, 1), 1e-3 * noise(9_000, 2)
    stream.push(loud)
    stream.flush()
    assert_same_bits(np.concatenate([stream.push(quiet), stream.flush()]), log_mel(quiet, CONFIG))


def test_the_running_maximum_and_its_floor():
    """Each chunk is clamped 80 dB below the loudest frame so far, or below the floor."""
    tone = np.sin(2 * np.pi * 1000 / 16000 * np.arange(CHUNK)).astype(np.float32)
    silence = np.zeros_like(tone)
    features = log_mel(np.concatenate([silence, tone, silence, silence]), CONFIG)
    lowest = features.reshape(4, 40, 80).min(axis=(1, 2))
    expected = lambda maximum: (maximum - 8 + 4) / 4  # noqa: E731
    assert lowest[0] == expected(CONFIG.floor)
    loudest = 4 * features.max() - 4
    assert loudest > 2
    np.testing.assert_allclose(lowest[1:], expected(loudest), atol=1e-6)

    higher = MelConfig(n_mels=80, floor=1.5)
    assert log_mel(silence, higher).max() == expected(1.5)


def test_stream_equals_clip_where_both_know_the_maximum():
    """A loud start settles the maximum: then only the end of the clip is treated otherwise."""
    audio = noise(10 * CHUNK)
    audio[:CHUNK] = np.random.default_rng(1).uniform(-1, 1, CHUNK)
    clip = log_mel(audio, MelConfig(n_mels=80, normalization="clip"))
    np.testing.assert_array_equal(log_mel(audio, CONFIG)[:-2], clip[:-2])


@pytest.mark.parametrize("n_mels", [40, 80, 128])
def test_filters_equal_librosa(n_mels):
    librosa_filters = pytest.importorskip("librosa.filters")
    expected = librosa_filters.mel(sr=16000, n_fft=400, n_mels=n_mels, dtype=np.float64).T
    np.testing.assert_allclose(mel_filters(MelConfig(n_mels=n_mels)), expected, atol=1e-12)


@pytest.mark.torch
@pytest.mark.parametrize("n_mels", [80, 128])
@pytest.mark.parametrize("samples", [201, 4_000, 16_000, 100_123])
def test_clip_equals_whisper(n_mels, samples):
    """Whisper's extractor without its padding to 30 s, in both of its implementations.

    Its torch implementation transforms in float32, which costs it up to 6e-5 in bands close to
    80 dB below the maximum; broadband noise has none, so 1e-5 holds. In float64 it always does.
    """
    transformers = pytest.importorskip("transformers")
    extractor = transformers.WhisperFeatureExtractor(feature_size=n_mels)
    config = MelConfig(n_mels=n_mels, normalization="clip")

    steady = np.random.default_rng(samples).uniform(-0.5, 0.5, samples).astype(np.float32)
    public = extractor(
        steady, sampling_rate=16000, padding="do_not_pad", truncation=False, return_tensors="np"
    )["input_features"][0].T
    ours = log_mel(steady, config)
    assert ours.shape == public.shape and ours.dtype == np.float32
    np.testing.assert_allclose(ours, public, rtol=0, atol=1e-5)

    wandering = noise(samples, seed=3)
    exact = extractor._np_extract_fbank_features(wandering[None], "cpu")[0].T
    np.testing.assert_allclose(log_mel(wandering, config), exact, rtol=0, atol=1e-5)


ODD = {
    "digital silence": np.zeros(20_000, np.float32),
    "DC": np.full(20_000, 0.7, np.float32),
    "clipping": np.clip(100 * noise(20_000), -1, 1),
    "one sample": np.ones(1, np.float32),
    "no sample": np.zeros(0, np.float32),
    "denormal": np.full(20_000, 1e-42, np.float32),
    "far too loud": 1e9 * noise(20_000),
    "float64": noise(20_000).astype(np.float64),
    "float16": noise(20_000).astype(np.float16),
}


@pytest.mark.parametrize("normalization", ["stream", "clip"])
@pytest.mark.parametrize("name", ODD)
def test_odd_input_gives_finite_features(name, normalization):
    features = log_mel(ODD[name], MelConfig(n_mels=80, normalization=normalization))
    assert features.dtype == np.float32 and np.isfinite(features).all()
    assert (len(features) > 0) == (len(ODD[name]) > 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
@pytest.mark.parametrize("normalization", ["stream", "clip"])
def test_bad_samples_are_an_error_with_their_time(bad, normalization):
    audio = noise(20_000).astype(np.float64)
    audio[16_160] = bad
    with pytest.raises(UserError, match=r"at 1\.010 s"):
        log_mel(audio, MelConfig(normalization=normalization))


def test_a_bad_piece_leaves_the_stream_as_it_was():
    stream, audio = StreamingLogMel(CONFIG), noise(20_000)
    outputs = [stream.push(audio[:8_000])]
    with pytest.raises(UserError, match=r"at 0\.500 s"):
        stream.push(np.full(10, np.nan, np.float32))
    outputs += [stream.push(audio[8_000:]), stream.flush()]
    assert_same_bits(np.concatenate(outputs), log_mel(audio, CONFIG))


@pytest.mark.parametrize("audio", [np.zeros((2, 100), np.float32), np.zeros(100, np.int16)])
def test_what_is_not_mono_float_is_an_error(audio):
    with pytest.raises(UserError, match="one channel of floating-point"):
        log_mel(audio, CONFIG)


def test_clip_cannot_be_streamed():
    with pytest.raises(UserError, match="whole recording"):
        StreamingLogMel(MelConfig(normalization="clip"))


@pytest.mark.parametrize("bad", [{"n_mels": 0}, {"floor": np.nan}, {"n_fft": 401}, {"n_fft": 100}])
def test_impossible_configs_are_errors(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        MelConfig(**bad)


def test_features_need_numpy_only():
    """The loader's workers and the command line import this module: no JAX, no librosa."""
    code = (
        "import sys, numpy as np; from ai_jax.audio.mel import MelConfig, log_mel;"
        "log_mel(np.zeros(9000), MelConfig());"
        "print([m for m in ('jax', 'librosa', 'scipy', 'torch') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
