"""Audio files: formats, rates, channels, streaming, bad files."""

import itertools
import tracemalloc

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from ai_jax.audio import io
from ai_jax.audio.mel import MelConfig, log_mel
from ai_jax.errors import UserError


def tone(seconds: float, rate: int, hz: float = 440.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hz * np.arange(round(seconds * rate)) / rate)


FORMATS = {
    "PCM_U8.wav": 1e-2,
    "PCM_16.wav": 1e-4,
    "PCM_24.wav": 1e-6,
    "FLOAT.wav": 1e-6,
    "DOUBLE.wav": 1e-6,
    "PCM_16.flac": 1e-4,
    "PCM_24.flac": 1e-6,
    "VORBIS.ogg": 6e-2,
    "MPEG_LAYER_III.mp3": 6e-2,
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rate", [8000, 16000, 44100])
@pytest.mark.parametrize("channels", [1, 2])
def test_formats_rates_and_channels(tmp_path, name, rate, channels):
    """A tone is the same tone at 16 kHz, whatever the file; channels are averaged."""
    path = tmp_path / name
    gains = [1.0] if channels == 1 else [1.5, 0.5]
    audio = np.stack([g * tone(1.0, rate) for g in gains], axis=1)
    soundfile.write(path, audio, rate, subtype=path.stem)

    samples = io.read(path)
    assert samples.dtype == np.float32 and samples.ndim == 1
    assert abs(samples.size - 16000) <= (0 if path.suffix != ".mp3" else 2500)
    # Away from the ends, where resampling and lossy codecs ring.
    middle = slice(2000, 14000)
    tolerance = FORMATS[name] + (0 if rate == 16000 else 1e-4)
    np.testing.assert_allclose(samples[middle], tone(1.0, 16000)[middle], atol=tolerance)


def test_six_channels_and_high_rates(tmp_path):
    audio = np.repeat(tone(0.5, 96000)[:, None], 6, axis=1)
    soundfile.write(tmp_path / "a.wav", audio, 96000, subtype="PCM_24")
    samples = io.read(tmp_path / "a.wav")
    np.testing.assert_allclose(samples[1000:7000], tone(0.5, 16000)[1000:7000], atol=1e-4)


def test_resampling_removes_what_16_khz_cannot_hold(tmp_path):
    soundfile.write(tmp_path / "a.wav", tone(1.0, 44100, hz=12_000), 44100, subtype="FLOAT")
    assert np.abs(io.read(tmp_path / "a.wav")[1000:-1000]).max() < 1e-4


@pytest.mark.parametrize("rate", [8000, 16000, 44100])
@pytest.mark.parametrize("block_seconds", [1 / 16000, 0.0123, 0.4, 100.0])
def test_stream_gives_the_samples_of_read(tmp_path, rate, block_seconds):
    path = tmp_path / "a.flac"
    rng = np.random.default_rng(0)
    seconds = 0.1 if block_seconds < 0.001 else 4.1
    soundfile.write(path, rng.uniform(-0.9, 0.9, (round(seconds * rate), 2)), rate)
    blocks = list(io.stream(path, block_seconds))
    size = round(block_seconds * 16000)
    assert all(b.size == size for b in blocks[:-1]) and 0 < blocks[-1].size <= size
    np.testing.assert_array_equal(np.concatenate(blocks), io.read(path))


@given(
    rate=st.sampled_from([8000, 22050, 44100, 48000]),
    cuts=st.lists(st.integers(0, 30_000), max_size=8),
)
@settings(max_examples=25, deadline=None)
def test_resampler_pieces_join_without_a_seam(rate, cuts):
    audio = np.random.default_rng(rate).uniform(-1, 1, 30_000).astype(np.float32)
    resampler = io.Resampler(rate, 16000)
    whole = np.concatenate([resampler.push(audio), resampler.flush()])
    pieces = [resampler.push(p) for p in np.split(audio, sorted(cuts))]
    np.testing.assert_array_equal(np.concatenate([*pieces, resampler.flush()]), whole)
    assert abs(whole.size - 30_000 * 16000 / rate) <= 1


def test_stream_needs_constant_memory(tmp_path):
    """Peak memory for 60 s is that for 15 s: both are many decoder blocks."""

    def peak(seconds: int) -> int:
        path = tmp_path / f"{seconds}.wav"
        soundfile.write(path, np.zeros((seconds * 44100, 2), np.int16), 44100)
        tracemalloc.start()
        assert sum(b.size for b in io.stream(path, 0.4)) == seconds * 16000
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    assert peak(60) < 1.2 * peak(15)


@pytest.mark.parametrize("samples, rate", [(1, 16000), (1, 8000), (10, 44100), (1600, 16000)])
def test_short_recordings_are_read(tmp_path, samples, rate):
    soundfile.write(tmp_path / "a.wav", np.full(samples, 0.5), rate)
    features = log_mel(io.read(tmp_path / "a.wav"), MelConfig())
    assert len(features) >= 1 and np.isfinite(features).all()


def _write_bytes(content: bytes):
    return lambda path: path.write_bytes(content)


BAD_FILES = {
    "missing.wav": (lambda path: None, "No such file"),
    "folder.wav": (lambda path: path.mkdir(), "is a directory"),
    "empty.wav": (_write_bytes(b""), "is empty"),
    "text.wav": (_write_bytes(b"This is not a sound.\n" * 100), "not audio"),
    "text.mp3": (_write_bytes(b"This is not a sound.\n" * 100), "not audio"),
    "headerless.raw": (_write_bytes(bytes(1000)), "not audio"),
    "nothing.wav": (lambda path: soundfile.write(path, np.zeros(0), 16000), "no audio samples"),
    "too_short.wav": (lambda path: soundfile.write(path, np.ones(1), 48000), "no audio samples"),
    "slow.wav": (lambda path: soundfile.write(path, np.zeros(100), 10), "10 Hz"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_one_sentence_that_names_them(tmp_path, name):
    make, sentence = BAD_FILES[name]
    path = tmp_path / name
    make(path)
    for call in (io.read, lambda p: list(io.stream(p, 0.4))):
        with pytest.raises(UserError, match=sentence) as error:
            call(path)
        assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_damaged_file_is_an_error(tmp_path):
    path = tmp_path / "a.flac"
    soundfile.write(path, np.random.default_rng(0).uniform(-1, 1, 200_000), 16000)
    content = bytearray(path.read_bytes())
    content[200_000:250_000] = bytes(50_000)
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"cannot decode .*a\.flac after"):
        io.read(path)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("second", [0.25, 9.5])
def test_non_finite_samples_are_named_by_file_and_time(tmp_path, bad, second):
    audio = np.zeros((441_000, 2), np.float32)
    audio[round(second * 44100), 1] = bad
    audio[round(second * 44100) + 1000 :] = np.nan
    soundfile.write(tmp_path / "broken.wav", audio, 44100, subtype="FLOAT")
    with pytest.raises(UserError, match=rf"broken\.wav .* at {second:.3f} s"):
        io.read(tmp_path / "broken.wav")


def test_errors_come_when_the_stream_reaches_them(tmp_path):
    audio = np.zeros(160_000, np.float32)
    audio[-1] = np.nan
    soundfile.write(tmp_path / "late.wav", audio, 16000, subtype="FLOAT")
    blocks = io.stream(tmp_path / "late.wav", 0.4)
    assert len(list(itertools.islice(blocks, 10))) == 10
    with pytest.raises(UserError, match=r"at 10\.000 s"):
        list(blocks)


@pytest.mark.parametrize("suffix", [".wav", ".flac"])
def test_what_16_bits_hold_is_written_exactly(tmp_path, suffix):
    values = np.random.default_rng(0).integers(-32768, 32768, 200_000)
    audio = (values / 32768).astype(np.float32)
    io.write(tmp_path / f"a{suffix}", audio)
    np.testing.assert_array_equal(io.read(tmp_path / f"a{suffix}"), audio)
    assert [p.name for p in tmp_path.iterdir()] == [f"a{suffix}"]


def test_long_ogg_and_loud_samples_are_written(tmp_path):
    io.write(tmp_path / "a.ogg", 0.1 * np.ones(60 * 44100), 44100)
    assert io.read(tmp_path / "a.ogg").size == 60 * 16000
    io.write(tmp_path / "a.wav", np.array([3.0, -3.0, 0.0]))
    np.testing.assert_array_equal(io.read(tmp_path / "a.wav"), np.float32([32767 / 32768, -1, 0]))


@pytest.mark.parametrize(
    "name, audio, sentence",
    [
        ("a.xyz", np.zeros(10), "must end in"),
        ("a.wav", np.zeros(0), "one channel"),
        ("a.wav", np.zeros((10, 2)), "one channel"),
        ("a.wav", np.zeros(10, np.int16), "float samples"),
        ("a.wav", np.full(10, np.nan), "NaN"),
        ("nowhere/a.wav", np.zeros(10), "No such file"),
    ],
)
def test_what_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path, name, audio, sentence):
    with pytest.raises(UserError, match=sentence):
        io.write(tmp_path / name, audio)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "a.mp3"
    io.write(path, tone(0.5, 16000))
    before = path.read_bytes()
    with pytest.raises(UserError, match="sample rates"):
        io.write(path, tone(0.5, 16000), rate=12345)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_a_block_must_hold_a_sample(tmp_path):
    with pytest.raises(UserError, match="block_seconds"):
        list(io.stream(tmp_path / "a.wav", 0.0))
