"""The evaluation against scripted listeners, on a small material made here."""

import json

import numpy as np
import pytest

from ai_jax.audio import io
from ai_jax.data import nano
from ai_jax.errors import UserError
from ai_jax.evals import sounds
from ai_jax.stream.listen import ChunkResult


class ScriptedEngine:
    """Stands for an engine whose replies are read off the peak of the clip (see ``material``)."""

    class config:
        class stream:
            threshold = 0.5


@pytest.fixture
def material(tmp_path):
    """Ten clips; their frequency tells the scripted listener which one it hears."""
    rows = [
        ("event", ["Siren"], ""),
        ("event", ["Siren"], ""),
        ("event", ["Cough"], ""),
        ("event", ["Typing"], ""),
        ("event", ["Cat"], ""),
        ("event", ["Growling"], ""),  # no clear answer: left out
        ("speech", ["Speech"], "good morning to all of you"),
        ("word", ["Speech"], "seven"),
        ("word", ["Speech"], "yes"),
        ("word", ["Speech"], "computer"),  # not of the list: running speech
    ]
    t = np.arange(16000 * 3) / 16000
    lines = []
    for i, (kind, labels, text) in enumerate(rows):
        io.write(tmp_path / f"{i}.flac", 0.5 * np.sin(2 * np.pi * (500 + 500 * i) * t))
        lines.append(
            {
                **{"path": f"{i}.flac", "kind": kind, "labels": labels, "text": text},
                **{"voice": "", "split": "test", "duration_s": 3.0, "source": "", "licence": ""},
            }
        )
    text = "\n".join(json.dumps(line) for line in lines)
    (tmp_path / "manifest.jsonl").write_text(text)
    return tmp_path


def scripted(replies):
    """``listen`` that answers clip i with replies[i]."""

    def listen(engine, blocks, *, threshold):
        (stream,) = blocks
        spectrum = np.abs(np.fft.rfft(stream))
        clip = round((np.argmax(spectrum) * 16000 / len(stream) - 500) / 500)
        for j, text in enumerate(replies.get(clip, [])):
            yield ChunkResult(j, 0.4 * j, "response", 0.9, text, (), 0.5)
        yield ChunkResult(9, 4.0, "silent", 0.1, "", (), 0.5)

    return listen


def test_figures(material, monkeypatch):
    siren, cough = nano.ALERTS["siren"], nano.ALERTS["cough"]
    replies = {0: [siren], 1: [cough, siren], 3: ["what?", "ha"], 6: ["hello"], 7: ["seven"]}
    monkeypatch.setattr(sounds, "listen", scripted(replies))
    report = sounds.evaluate(ScriptedEngine(), material, "test")
    assert len(report.heard) == 9
    assert report.recall == pytest.approx(2 / 3)
    assert report.silent == pytest.approx(1 / 2)
    assert report.balanced == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert report.right == pytest.approx(1 / 3), "the first reply counts"
    assert report.false_alarms_per_minute == pytest.approx(2 / (2 * 3 / 60))
    assert report.words == pytest.approx(1 / 2)
    assert report.speech == pytest.approx(1 / 2), "a word that is not of the list is speech"
    only = sounds.evaluate(ScriptedEngine(), material, "test", kinds=("word",))
    assert {h.kind for h in only.heard} == {"word"}
    assert np.isnan(only.recall)


def test_report_is_saved_and_printed(material, monkeypatch, tmp_path):
    monkeypatch.setattr(sounds, "listen", scripted({0: [nano.ALERTS["siren"]]}))
    report = sounds.evaluate(ScriptedEngine(), material, "test")
    sounds.save([report], tmp_path / "report.json")
    saved = json.loads((tmp_path / "report.json").read_text())
    assert saved[0]["recall"] == pytest.approx(1 / 3)
    assert len(saved[0]["heard"]) == 9
    assert "alert: siren (right)" in list(sounds.table(report).columns[0].cells)


def test_clips_are_placed_at_one_level_in_room_tone():
    audio = np.zeros(16000, np.float32)
    audio[8000] = 0.01
    stream = sounds._stream(audio, seed=0)
    assert len(stream) == 5 * 16000
    assert np.argmax(np.abs(stream)) == 2 * 16000 + 8000
    assert np.abs(stream).max() == pytest.approx(0.5, abs=0.01)
    assert 0 < np.std(stream[:32000]) < 2e-3


def test_long_clips_are_cut_to_their_loudest_stretch():
    audio = np.zeros(16000 * 20, np.float32)
    audio[16000 * 13] = 1.0
    assert len(sounds._loudest(audio)) == 16000 * 8
    assert sounds._loudest(audio).max() == 1.0
    assert len(sounds._loudest(audio[:100])) == 100


def test_nothing_to_hear(material):
    with pytest.raises(UserError, match="no recordings in the split 'val'"):
        sounds.evaluate(ScriptedEngine(), material, "val")
