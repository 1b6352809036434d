"""Procedural sounds: valid audio, reproducible, varied, and with the marks of their class."""

import time

import numpy as np
import pytest

from ai_jax.data import sounds
from ai_jax.data.sounds import dsp
from ai_jax.errors import UserError

RATE = 16_000


def draw(label: str, seed: int = 0) -> np.ndarray:
    return sounds.synthesize(label, np.random.default_rng(seed))


def spectrum(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    power = np.abs(np.fft.rfft(x)) ** 2
    return np.fft.rfftfreq(len(x), 1 / RATE), power / power.sum()


def share(x: np.ndarray, low: float, high: float) -> float:
    """Part of the energy between two frequencies."""
    f, power = spectrum(x)
    return float(power[(f >= low) & (f < high)].sum())


@pytest.mark.parametrize("label", sounds.SYNTHESIZED)
def test_audio_is_valid(label):
    for seed in range(4):
        x = draw(label, seed)
        assert x.dtype == np.float32 and x.ndim == 1
        assert np.isfinite(x).all()
        assert np.abs(x).max() == pytest.approx(0.99, abs=1e-3)
        assert sounds.MIN_SECONDS <= len(x) / RATE <= sounds.MAX_SECONDS
        assert abs(x.mean()) < 0.01


@pytest.mark.parametrize("label", sounds.SYNTHESIZED)
def test_same_seed_same_sound_other_seed_other_sound(label):
    x, again, other = draw(label, 1), draw(label, 1), draw(label, 2)
    np.testing.assert_array_equal(x, again)
    n = min(len(x), len(other))
    assert abs(np.corrcoef(x[:n], other[:n])[0, 1]) < 0.9


def test_unknown_label_is_named():
    with pytest.raises(UserError, match="moon"):
        draw("moon")


def test_smoke_alarms_are_tonal_and_thunder_is_low():
    """Over several draws, since each is heard through another room and microphone."""
    alarm = [np.sort(spectrum(draw("smoke_alarm", seed))[1])[-200:].sum() for seed in range(8)]
    assert np.median(alarm) > 0.8
    thunder = [share(draw("thunder", seed), 0, 500) for seed in range(8)]
    glass = [share(draw("glass_break", seed), 0, 500) for seed in range(8)]
    assert np.median(thunder) > 0.7 > 0.3 > np.median(glass)


def test_pulses_are_harmonic_and_band_limited():
    f, power = spectrum(dsp.pulses(np.full(RATE, 500.0)))
    harmonics = np.isin(np.round(f), np.arange(500, 7700, 500))
    assert power[harmonics].sum() > 0.99
    assert power[f > 7700].sum() < 1e-3


def test_low_pass_is_3_db_down_at_its_cutoff_and_causal():
    t = dsp.time(RATE)
    y = dsp.filtered(np.sin(2 * np.pi * 1000 * t), dsp.low_pass(1000))
    steady = y[RATE // 4 : -RATE // 4]
    assert steady.std() / np.sqrt(0.5) == pytest.approx(np.sqrt(0.5), rel=0.01)
    click = np.zeros(4000)
    click[2000] = 1.0
    y = dsp.filtered(click, dsp.low_pass(1000))
    before, after = np.square(y[:1999]).sum(), np.square(y[1999:]).sum()
    assert before < 0.05 * after


def test_noise_falls_by_its_slope():
    x = dsp.noise(np.random.default_rng(0), 16 * RATE, 6.0)
    octaves = [share(x, f, 2 * f) / f for f in (200, 400, 800, 1600)]
    fall_db = -np.diff(10 * np.log10(octaves))
    np.testing.assert_allclose(fall_db, 6.0, atol=0.5)


def test_fast_length_is_the_next_smooth_number():
    assert [dsp.fast_length(n) for n in (1, 7, 11, 13, 4097)] == [1, 8, 12, 15, 4320]


def test_room_keeps_the_direct_sound_and_adds_a_tail():
    x = np.zeros(1000)
    x[0] = 1.0
    y = dsp.room(np.random.default_rng(0), x, t60=0.5, wet=0.5)
    assert len(y) > len(x)
    assert y[0] == pytest.approx(1.0, abs=0.05)
    energy = np.square(y[1:])
    assert energy.sum() == pytest.approx(0.25, rel=0.05)
    assert energy[: len(energy) // 4].sum() > 5 * energy[-len(energy) // 4 :].sum()


def test_background_has_the_asked_length():
    for seed in range(6):
        x = sounds.background(np.random.default_rng(seed), 3.0)
        assert len(x) == 3 * RATE and np.isfinite(x).all() and np.abs(x).max() <= 1


def test_a_second_of_sound_costs_little():
    """Streams are composed while the model trains, so drawing sounds must be cheap."""
    seconds = 0.0
    start = time.process_time()
    for seed, label in enumerate(sounds.SYNTHESIZED):
        seconds += len(draw(label, seed)) / RATE
    assert (time.process_time() - start) / seconds < 0.06
