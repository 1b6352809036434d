"""Variations of a clip."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ai_jax.data import augment

RATE = 16_000


def tone(frequency: float, seconds: float = 1.0) -> np.ndarray:
    return np.sin(2 * np.pi * frequency * np.arange(round(seconds * RATE)) / RATE)


@pytest.mark.parametrize("speed", [0.85, 1.0, 1.18])
def test_change_speed_moves_length_and_pitch(speed):
    y = augment.change_speed(tone(1000.0), speed)
    assert len(y) == pytest.approx(RATE / speed, rel=0.02)
    peak = np.argmax(np.abs(np.fft.rfft(y))) * RATE / len(y)
    assert peak == pytest.approx(1000 * RATE / len(y), rel=0.005)
    middle = y[1000:-1000]
    assert middle.std() == pytest.approx(np.sqrt(0.5), rel=0.02)


@given(st.integers(0, 10_000), st.floats(1.0, 3.0))
@settings(max_examples=25, deadline=None)
def test_excerpt_keeps_the_loudest_second(at, seconds):
    audio = np.full(5 * RATE, 0.01)
    loud = 4 * at  # anywhere from the start to 2.5 s
    audio[loud : loud + RATE] = 1.0
    cut = augment.excerpt(audio, seconds, np.random.default_rng(at))
    assert len(cut) == round(seconds * RATE)
    assert (cut == 1.0).sum() == RATE


def test_excerpt_leaves_short_clips_alone():
    audio = tone(300.0)
    assert augment.excerpt(audio, 2.0, np.random.default_rng(0)) is audio


def test_active_span_finds_the_sound_between_quiet():
    audio = 1e-4 * np.random.default_rng(0).standard_normal(3 * RATE)
    audio[RATE : 2 * RATE] += tone(500.0)
    start, end = augment.active_span(audio)
    assert start == pytest.approx(1.0, abs=0.02) and end == pytest.approx(2.0, abs=0.02)


def test_tilt_changes_the_balance_of_two_octaves():
    y = augment.tilt(tone(1000.0) + tone(4000.0), 3.0)
    spectrum = np.abs(np.fft.rfft(y))
    assert 20 * np.log10(spectrum[4000] / spectrum[1000]) == pytest.approx(6.0, abs=0.2)


def test_augment_is_reproducible_bounded_and_varied():
    clip = tone(700.0)
    one, same, other = (
        augment.augment(clip, np.random.default_rng(seed), gain_db=(-14, 0)) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, same)
    assert one.dtype == np.float32 and one.shape != other.shape
    for seed in range(20):
        y = augment.augment(clip, np.random.default_rng(seed))
        assert 10 ** (-14 / 20) * 0.99 <= np.abs(y).max() <= 1.0
