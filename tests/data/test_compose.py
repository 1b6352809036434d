"""Algorithm 4: timing, levels and seams of composed streams."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ai_jax.data.compose import (
    ComposeConfig,
    Event,
    active_power,
    compose,
    fade,
    resolve,
    tile_crossfade,
)
from ai_jax.errors import UserError

CHUNK = 6400
FADE = 320
CONFIG = ComposeConfig()


def rng(seed=0):
    return np.random.default_rng(seed)


def noise(seconds, level=0.05, seed=0):
    return (level * rng(seed).standard_normal(round(seconds * 16000))).astype(np.float32)


def rms_db(x):
    return 10 * np.log10(np.mean(np.square(x, dtype=np.float64)))


# --- timeline ---------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(1, 3 * CHUNK), min_size=1, max_size=8), st.data())
def test_response_falls_on_the_ceiling(sizes, data):
    answered = data.draw(st.integers(0, len(sizes) - 1))
    events = [
        Event(np.ones(n, np.float32), response="yes" if i == answered else None)
        for i, n in enumerate(sizes)
    ]
    stream = compose(events, (), (), rng())
    heard = Fraction(sum(sizes[: answered + 1]), CHUNK)
    assert stream.timeline == ((math.ceil(heard), "yes"),)
    assert stream.audio.size == sum(sizes)


@pytest.mark.parametrize("chunks", range(1, 60))
def test_a_trigger_at_the_end_of_a_chunk_is_answered_by_that_chunk(chunks):
    # In float seconds 0.4 * 3 / 0.4 exceeds 3, and its ceiling is 4.
    event = Event(np.zeros(70 * CHUNK, np.float32), trigger=0.4 * chunks, response="now")
    assert compose([event], (), (), rng()).timeline == ((chunks, "now"),)


def test_trigger_at_the_very_start_belongs_to_the_first_chunk():
    event = Event(np.zeros(10, np.float32), trigger=0.0, response="now")
    assert compose([event], (), (), rng()).timeline == ((1, "now"),)


@given(st.lists(st.integers(0, 20 * CHUNK), max_size=12))
def test_responses_of_one_chunk_move_to_the_next_free_one(samples):
    triggers = [(n, str(i)) for i, n in enumerate(samples)]
    timeline = resolve(triggers, CHUNK)
    taken = set()
    for n, response in sorted(triggers, key=lambda t: t[0]):
        chunk = max(math.ceil(Fraction(n, CHUNK)), 1)
        while chunk in taken:
            chunk += 1
        # Chunks are taken in order of time, so the next free one is after all earlier responses.
        assert (chunk, response) in timeline
        taken.add(chunk)
    chunks = [chunk for chunk, _ in timeline]
    assert chunks == sorted(taken)


def test_a_stream_of_free_length_keeps_every_response():
    events = [Event(np.ones(100, np.float32), response=str(i)) for i in range(3)]
    stream = compose(events, (), (), rng())
    assert stream.timeline == ((1, "0"), (2, "1"), (3, "2"))
    assert stream.audio.size == 3 * CHUNK


@settings(deadline=None)
@given(st.lists(st.integers(1, 3 * CHUNK), max_size=6), st.integers(1, 8))
def test_fixed_length_pads_or_cuts(sizes, chunks):
    events = [
        Event(np.ones(n, np.float32), response="r", label=str(i)) for i, n in enumerate(sizes)
    ]
    stream = compose(events, (), (), rng(), chunks=chunks)
    assert stream.audio.size == chunks * CHUNK
    assert all(1 <= chunk <= chunks for chunk, _ in stream.timeline)
    assert all(0 <= start < end <= chunks * 0.4 + 1e-9 for start, end, _ in stream.spans)
    if sizes:
        free = compose(events, (), (), rng())
        assert stream.timeline == tuple(r for r in free.timeline if r[0] <= chunks)
        both = min(free.audio.size, stream.audio.size)
        np.testing.assert_array_equal(stream.audio[:both], free.audio[:both])
        assert not stream.audio[both:].any()


def test_spans_say_where_each_event_sounds():
    events = [
        Event(np.full(8000, 0.1, np.float32), label="a"),
        Event(np.full(4000, 0.1, np.float32), "background", label="b"),
        Event(np.full(16000, 0.2, np.float32), label="c"),
    ]
    stream = compose(events, (), (), rng(3))
    assert stream.spans[0] == (0.0, 0.5, "a")
    assert stream.spans[2] == (0.5, 1.5, "c")
    start, end, label = stream.spans[1]
    assert label == "b" and end - start == pytest.approx(0.25)
    silent = compose([events[0], events[2]], (), (), rng(3))
    heard = np.flatnonzero(stream.audio != silent.audio) / 16000
    assert start <= heard.min() <= start + 0.001 and end - 0.001 <= heard.max() <= end


# --- levels -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("role", "gain_db"), [("background", -6.0), ("ambient", -12.0)])
def test_role_gains(role, gain_db):
    clip = noise(1.0, level=0.1)
    quiet = Event(np.zeros(5 * 16000, np.float32))
    stream = compose([quiet, Event(clip, role, label="x")], (), (), rng(1))
    start = round(stream.spans[1][0] * 16000)
    heard = stream.audio[start + FADE : start + clip.size - FADE]
    assert rms_db(heard) - rms_db(clip[FADE:-FADE]) == pytest.approx(gain_db, abs=1e-4)
    np.testing.assert_array_equal(
        compose([Event(clip)], (), (), rng(1)).audio[FADE:-FADE], clip[FADE:-FADE]
    )


def test_background_precedes_or_follows_its_foreground_alike():
    fore, back = Event(noise(3.0)), Event(noise(1.0, seed=1), "background")
    before = compose([back, fore], (), (), rng(5)).audio
    np.testing.assert_array_equal(before, compose([fore, back], (), (), rng(5)).audio)


def test_background_longer_than_the_stream_is_an_excerpt():
    stream = compose([Event(noise(9.0), "ambient", label="x")], (), (), rng(), chunks=5)
    assert stream.spans == ((0.0, 2.0, "x"),)
    assert active_power(stream.audio[-FADE:], FADE) > 0


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.booleans(), st.floats(0.001, 0.05), st.floats(1e-4, 3.0))
def test_realised_snr_is_the_drawn_one(seed, ambient, level, noise_level):
    events = [Event(noise(1.5, level)), Event(np.zeros(16000, np.float32))]
    pool = [noise(0.9, noise_level, seed=2)]
    # The noise is drawn last: without it, the same seed gives the clean stream.
    clean = compose(events, (), (), rng(seed), chunks=10).audio
    stream = compose(events, *(((), pool) if ambient else (pool, ())), rng(seed), chunks=10)
    drawn = stream.snr_db[ambient]
    low, high = (10.0, 25.0) if ambient else (5.0, 20.0)
    assert low <= drawn <= high
    added = stream.audio - clean
    realised = 10 * np.log10(active_power(clean, FADE) / active_power(added, FADE))
    assert realised == pytest.approx(drawn, abs=0.01)
    assert active_power(added[-CHUNK:], FADE) > 0  # under the padding too


def test_snrs_cover_their_range():
    events = [Event(noise(0.5))]
    drawn = np.array([compose(events, (), (), rng(s)).snr_db for s in range(300)])
    assert drawn[:, 0].min() < 6 and drawn[:, 0].max() > 19
    assert drawn[:, 1].min() < 11 and drawn[:, 1].max() > 24
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 0.2


def test_power_counts_active_parts_only():
    burst = noise(0.5, level=0.1)
    pause = 1e-4 * noise(1.0, level=0.1, seed=1)
    assert active_power(np.concatenate([burst, pause, burst]), FADE) == pytest.approx(
        np.mean(np.square(burst)), rel=0.01
    )
    assert active_power(np.zeros(1000, np.float32), FADE) == 0.0
    assert active_power(np.full(100, 0.5, np.float32), FADE) == pytest.approx(0.25)  # one frame


def test_turning_down_a_loud_mix_keeps_its_ratios():
    def mixed(level):
        events = [Event(noise(1.0, level)), Event(noise(0.5, level, seed=1), "background")]
        return compose(events, [noise(0.5)], [noise(0.5, seed=4)], rng(7)).audio

    quiet, loud = mixed(0.02), mixed(2.0)
    assert np.abs(quiet).max() < 0.5
    assert np.abs(loud).max() == 1.0
    np.testing.assert_allclose(loud, quiet / np.abs(quiet).max(), atol=1e-6)


def test_noise_has_a_level_of_its_own_where_nothing_else_sounds():
    silence = Event(np.zeros(32000, np.float32))
    stream = compose([silence], [noise(1.0)], (), rng())
    level = 10 * np.log10(active_power(stream.audio, FADE))
    assert level == pytest.approx(CONFIG.silent_level_db - stream.snr_db[0], abs=0.01)


@pytest.mark.parametrize("pool", [(), [np.zeros(16000, np.float32)], [np.zeros(0, np.float32)]])
def test_no_noise_or_digital_silence_adds_nothing(pool):
    event = Event(noise(1.0))
    np.testing.assert_array_equal(
        compose([event], pool, pool, rng()).audio, fade(event.audio, FADE)
    )
    assert not compose([], pool, (), rng(), chunks=2).audio.any()


# --- seams ------------------------------------------------------------------------------------


def test_no_clicks_between_or_under_clips():
    # Constant clips of opposite sign: any seam that is not faded jumps by 0.1 to 1.
    events = [Event(np.full(5000, 0.5 * (-1) ** i, np.float32)) for i in range(6)]
    events += [Event(np.full(3000, 0.5, np.float32), role) for role in ("background", "ambient")]
    audio = compose(events, (), (), rng()).audio
    steepest = 0.5 * np.pi / 2 / FADE  # of the taper
    assert np.abs(np.diff(audio)).max() <= 1.8 * steepest
    assert np.abs(audio[[0, -1]]).max() <= 1.8 * steepest


@settings(deadline=None)
@given(st.lists(st.integers(50, 5000), min_size=1, max_size=4), st.integers(1, 20000))
@example([1, 2, 3], 500)
def test_noise_track_is_full_and_seamless(sizes, length):
    clips = [np.full(n, (-1.0) ** i, np.float32) for i, n in enumerate(sizes)]
    track = tile_crossfade(clips, length, rng(), FADE)
    assert track.shape == (length,) and track.dtype == np.float32
    if min(sizes) >= 2 * FADE:
        assert np.abs(np.diff(track)).max(initial=0) <= 1.001 * np.sqrt(2) * np.pi / 2 / FADE
        assert np.abs(track).max() <= np.sqrt(2) + 1e-6


def test_crossfades_keep_the_power_of_noise():
    track = tile_crossfade([noise(0.1, 0.1), noise(0.13, 0.1, seed=1)], 16000 * 5, rng(), FADE)
    frames = np.sqrt(np.mean(np.square(track.reshape(-1, 1600)), axis=1))
    assert 0.08 < frames.min() and frames.max() < 0.12


def test_long_noise_is_a_random_excerpt():
    clip = np.arange(50000, dtype=np.float32)
    starts = set()
    for seed in range(5):
        track = tile_crossfade([clip], 1000, rng(seed), FADE)
        np.testing.assert_array_equal(np.diff(track), 1)
        starts.add(track[0])
    assert len(starts) == 5


@given(st.integers(1, 1000))
def test_fade_of_any_length(n):
    clip = np.ones(n, np.float32)
    faded = fade(clip, FADE)
    assert (clip == 1).all() and faded.max() <= 1 and faded.size == n
    if n > 1:
        assert faded[0] == faded[-1] == 0


# --- the whole --------------------------------------------------------------------------------


def test_purity():
    events = [Event(noise(1.0), response="a"), Event(noise(0.7, seed=1), "background", label="b")]
    before = [event.audio.copy() for event in events]
    first = compose(events, [noise(0.5)], [noise(2.0)], rng(11), chunks=6)
    again = compose(events, [noise(0.5)], [noise(2.0)], rng(11), chunks=6)
    assert first.audio.tobytes() == again.audio.tobytes()
    assert first[1:] == again[1:]
    assert first.audio.dtype == np.float32
    for event, audio in zip(events, before, strict=True):
        np.testing.assert_array_equal(event.audio, audio)
    other = compose(events, [noise(0.5)], [noise(2.0)], rng(12), chunks=6)
    assert (first.audio != other.audio).any()


def test_preprocess_runs_on_every_clip_before_its_duration_counts():
    events = [Event(noise(2.0), response="a"), Event(noise(1.0), "background")]
    seen = []

    def halve(audio):
        seen.append(audio.size)
        return audio[: audio.size // 2]

    stream = compose(events, (), (), rng(), preprocess=halve)
    assert seen == [32000, 16000]
    assert stream.audio.size == 16000
    assert stream.timeline == ((3, "a"),)


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Event(np.zeros(0, np.float32)),
        lambda: Event(np.zeros((2, 5), np.float32)),
        lambda: Event(np.ones(5, np.float32), "somewhere"),
        lambda: Event(np.ones(5, np.float32), "ambient", response="never"),
        lambda: Event(np.ones(5, np.float32), trigger=-1.0),
        lambda: Event(np.ones(5, np.float32), trigger=float("nan")),
        lambda: compose([Event(np.array([0, np.nan], np.float32))], (), (), rng()),
        lambda: compose([], (), (), rng()),
        lambda: ComposeConfig(chunk=0.0),
        lambda: ComposeConfig(snr_db=(20.0, 5.0)),
    ],
)
def test_bad_input_is_one_sentence(bad):
    with pytest.raises(UserError):
        bad()
