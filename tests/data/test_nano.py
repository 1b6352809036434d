"""The nano catalogue and the streams drawn from it."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest

from ai_jax.audio import io
from ai_jax.data import nano, sounds
from ai_jax.data.compose import compose
from ai_jax.data.sources import Material
from ai_jax.errors import UserError

RATE = 16_000
CLIPS = (
    ("event", ("Siren",), "", 3.0),
    ("event", ("Bark",), "", 0.4),
    ("event", ("Meow",), "", 0.7),
    ("event", ("Telephone bell ringing",), "", 2.0),
    ("music", ("Guitar", "Music"), "", 4.0),
    ("noise", ("Noise",), "", 2.0),
    ("speech", ("Speech",), "this is a sentence", 2.5),
    ("word", ("Speech",), "Stop", 0.5),
    ("word", ("Speech",), "seven", 0.6),
)


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Material:
    """One clip of each kind for every split; the clips of a split share one constant sign."""
    folder = tmp_path_factory.mktemp("material")
    rng = np.random.default_rng(0)
    rows = []
    for split in ("train", "val", "test"):
        for i, (kind, labels, text, seconds) in enumerate(CLIPS):
            path = f"{split}-{i}.wav"
            n = round(seconds * RATE)
            io.write(folder / path, (0.3 * rng.standard_normal(n)).astype(np.float32), RATE)
            rows.append(
                dict(
                    path=path, kind=kind, labels=labels, text=text, voice="v" if text else "",
                    split=split, duration_s=seconds, source="test", licence="CC0",
                )
            )  # fmt: skip
    (folder / "manifest.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return Material(folder)


def test_catalogue_is_complete_and_distinct():
    assert len(nano.ALERTS) == 12 and len(nano.WORDS) == 30 and len(nano.BENIGN) >= 15
    assert set(nano.ALERTS) | set(nano.BENIGN) == set(sounds.SYNTHESIZED)
    assert len(set(nano.LABELS)) == len(nano.LABELS)
    assert len(set(nano.ALERTS.values())) == len(nano.ALERTS)
    for sentence in nano.ALERTS.values():
        assert len(sentence.split()) <= 12 and sentence[0].isupper() and sentence[-1] in ".?"
    assert all(word == word.lower() for word in nano.WORDS)


@pytest.mark.parametrize(
    ("names", "kind", "label"),
    [
        (["Siren"], "event", "siren"),
        (["Fire engine, fire truck (siren)", "Siren"], "event", "siren"),
        (["Guitar", "Music"], "music", "music"),
        (["Speech"], "speech", "speech"),
        (["Telephone bell ringing"], "event", None),
        (["Dog", "Cat"], "event", None),
        (["Thunder", "An unknown name"], "event", "thunder"),
        (["Chatter"], "noise", "chatter"),
        ([], "event", None),
    ],
)
def test_label_of(names, kind, label):
    assert nano.label_of(names, kind) == label


def test_every_audioset_name_belongs_to_one_label():
    names = [name for names in nano._AUDIOSET.values() for name in names]
    assert len(names) == len(set(names))
    assert set(nano._AUDIOSET) == set(nano.ALERTS) | set(nano.BENIGN)


def test_plan_is_a_pure_function_of_the_seed(material):
    one, same, other = (
        nano.plan(material, "train", np.random.default_rng(seed)) for seed in (3, 3, 4)
    )
    assert [e.label for e in one.events] == [e.label for e in same.events]
    for a, b in zip(one.events, same.events, strict=True):
        np.testing.assert_array_equal(a.audio, b.audio)
    assert [len(e.audio) for e in one.events] != [len(e.audio) for e in other.events]


def test_plans_hold_valid_events(material):
    answers = {**nano.ALERTS, **{word: word for word in nano.WORDS}}
    for seed in range(12):
        plan = nano.plan(material, "train", np.random.default_rng(seed), 12.0)
        foreground = [e for e in plan.events if e.role == "foreground"]
        assert sum(len(e.audio) for e in foreground) / RATE >= 12.0
        for event in plan.events:
            assert event.audio.dtype == np.float32 and np.isfinite(event.audio).all()
            assert np.abs(event.audio).max() <= 1.0
            assert event.label in ("", *nano.LABELS)
            expected = answers.get(event.label)
            assert event.response == expected
            if expected:
                assert 0.0 < event.trigger <= len(event.audio) / RATE
        alerts = [e.label for e in foreground if e.label]
        assert not any(a == b and a in nano.ALERTS for a, b in itertools.pairwise(alerts))


def test_classes_are_balanced(material, monkeypatch):
    clips = nano._Clips(material, "train")
    # The draw itself, without the cost of making every sound.
    monkeypatch.setattr(clips, "sound", lambda label, rng: np.ones(100, np.float32))
    rng, counts, last = np.random.default_rng(0), Counter(), ""
    for _ in range(4000):
        events = clips.draw(rng, last)
        last = events[0].label
        counts.update(event.label for event in events)
    for group in (list(nano.ALERTS), list(nano.BENIGN), ["stop", "seven"]):
        drawn = np.array([counts[label] for label in group])
        # Five standard deviations of a count.
        assert np.abs(drawn - drawn.mean()).max() < 5 * np.sqrt(drawn.mean())
    assert counts["speech"] > 200


def test_validation_and_test_hold_only_their_recordings(material):
    for split in ("val", "test"):
        labels = set()
        for seed in range(12):
            plan = nano.plan(material, split, np.random.default_rng(seed), 12.0)
            labels |= {event.label for event in plan.events}
        assert labels <= {"", "siren", "dog_bark", "cat", "music", "speech", "stop", "seven"}
        assert {"siren", "dog_bark", "cat", "stop", "seven"} <= labels


def test_alerts_are_answered_soon_after_onset_or_end():
    quiet = np.zeros(RATE // 2, np.float32)
    long = nano._event("siren", np.concatenate([quiet, np.ones(4 * RATE, np.float32)]))
    assert long.trigger == pytest.approx(0.5 + 1.6, abs=0.02)
    short = nano._event("knock", np.ones(RATE // 2, np.float32))
    assert short.trigger == pytest.approx(0.5 + 0.2, abs=0.02)
    assert len(short.audio) / RATE >= short.trigger
    assert nano._event("cat", np.ones(RATE, np.float32)).response is None


def test_empty_split_is_an_error(tmp_path):
    (tmp_path / "manifest.jsonl").write_text("")
    with pytest.raises(UserError, match="'val'"):
        nano.plan(Material(tmp_path), "val", np.random.default_rng(0))


def test_training_without_any_material_uses_synthesis_alone(tmp_path):
    (tmp_path / "manifest.jsonl").write_text("")
    plan = nano.plan(Material(tmp_path), "train", np.random.default_rng(0), 8.0)
    assert any(event.response for event in plan.events)


def test_demo_composes_to_half_a_minute_with_its_words():
    spoken = [(w, 0.5 * np.ones(RATE // 2, np.float32)) for w in ("yes", "five", "louder")]
    for seed in range(2):
        rng = np.random.default_rng(seed)
        plan = nano.demo_plan(rng, spoken)
        stream = compose(*plan, rng)
        assert 22 <= len(stream.audio) / RATE <= 38
        responses = [text for _, text in stream.timeline]
        assert len(responses) == 8
        assert [r for r in responses if r in nano.WORDS] == ["yes", "five", "louder"]
        assert len({r for r in responses if r in nano.ALERTS.values()}) == 5
