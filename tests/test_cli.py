"""The command line as a user meets it: right answers, or one sentence and exit code 2."""

import json
import subprocess
import sys

import numpy as np
import pytest
import soundfile
from refusal import ai_jax

from ai_jax.convert import hf_folder
from ai_jax.model import omni


@pytest.fixture(scope="session")
def model(tmp_path_factory, tiny, byte_tokenizer):
    """The tiny model with random weights in Hugging Face format."""
    folder = tmp_path_factory.mktemp("models")
    byte_tokenizer._tokenizer.save(str(folder / "tokenizer.json"))
    params = omni.init_params(tiny, seed=0)
    tokenizer = folder / "tokenizer.json"
    hf_folder.write_model_folder(tiny, params, folder / "tiny", tokenizer, {})
    return folder / "tiny"


@pytest.fixture
def run(monkeypatch, capsys):
    """Run ``ai-jax ARGS`` in this process: (exit code, stdout, stderr)."""
    return lambda *args: ai_jax(monkeypatch, capsys, *args)


def sound(seconds, rate=16000, channels=1):
    t = np.arange(int(seconds * rate)) / rate
    audio = 0.3 * np.sin(2 * np.pi * 440 * t)
    return audio if channels == 1 else np.stack([audio] * channels, axis=1)


GOOD = {
    "16k.wav": (sound(1.0), 16000, "PCM_16", 3),
    "short.wav": (sound(0.1), 16000, "PCM_16", 1),
    "one.wav": (np.array([0.5]), 16000, "PCM_16", 1),
    "8k.wav": (sound(1.0, 8000), 8000, "PCM_16", 3),
    "stereo.wav": (sound(1.0, 44100, 2), 44100, "PCM_16", 3),
    "24bit.flac": (sound(1.0), 16000, "PCM_24", 3),
    "float.wav": (sound(1.0, 48000), 48000, "FLOAT", 3),
    "silence.wav": (np.zeros(16000), 16000, "PCM_16", 3),
    "clipped.wav": (np.sign(sound(1.0)), 16000, "PCM_16", 3),
}


@pytest.mark.parametrize("name", GOOD)
def test_any_recording_is_heard(run, model, tmp_path, name):
    audio, rate, subtype, chunks = GOOD[name]
    soundfile.write(tmp_path / name, audio, rate, subtype=subtype)
    code, out, _ = run("listen", tmp_path / name, "--model", model, "--json")
    assert code == 0
    records = [json.loads(line) for line in out.splitlines()]
    assert [r["chunk"] for r in records] == list(range(chunks))
    for r in records:
        assert list(r) == ["chunk", "t", "decision", "p_response", "text"]
        assert r["t"] == pytest.approx(0.4 * (r["chunk"] + 1))
        assert 0 <= r["p_response"] <= 1
        assert (r["decision"] == "response") == (r["p_response"] >= 0.5)


def _bad_files(folder):
    (folder / "empty.wav").write_bytes(b"")
    (folder / "text.wav").write_text("not a sound\n" * 20)
    broken = sound(1.0)
    for name, value in (("nan.wav", np.nan), ("inf.wav", np.inf)):
        broken[8000] = value
        soundfile.write(folder / name, broken, 16000, subtype="FLOAT")
    soundfile.write(folder / "header-only.wav", np.zeros(0), 16000)
    (folder / "folder.wav").mkdir()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing.wav", "No such file"),
        ("empty.wav", "is empty"),
        ("text.wav", "not audio"),
        ("nan.wav", "NaN or infinite sample at 0.500 s"),
        ("inf.wav", "NaN or infinite sample at 0.500 s"),
        ("header-only.wav", "no audio samples"),
        ("folder.wav", "is a directory"),
    ],
)
def test_bad_recordings_are_one_sentence(run, model, tmp_path, name, says):
    _bad_files(tmp_path)
    code, out, err = run("listen", tmp_path / name, "--model", model)
    assert code == 2
    assert out == ""
    assert err.startswith("ai-jax: error: ")
    assert err.count("\n") == 1
    assert says in err
    assert name in err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--threshold", "1.5"], "between 0 and 1"),
        (["--model", "nowhere"], "nowhere"),
        (["--model", "."], "is not a model"),
    ],
)
def test_bad_options_are_one_sentence(run, model, tmp_path, monkeypatch, args, says):
    monkeypatch.chdir(tmp_path)
    soundfile.write("a.wav", sound(0.5), 16000)
    code, _, err = run("listen", "a.wav", *args)
    assert code == 2
    assert err.startswith("ai-jax: error: ")
    assert err.count("\n") == 1
    assert says in err


def test_no_traceback_from_the_installed_command(tmp_path):
    command = [sys.executable, "-m", "ai_jax.cli", "listen", str(tmp_path / "missing.wav")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("ai-jax: error: cannot read")
    assert "Traceback" not in done.stderr


@pytest.mark.filterwarnings("ignore:Glyph")  # random weights speak in all scripts
def test_timeline_and_picture(run, model, tmp_path):
    soundfile.write(tmp_path / "a.wav", sound(2.0), 16000)
    picture = tmp_path / "pictures" / "a.png"
    args = ["--model", model, "--threshold", "0.000001", "--plot", picture]
    code, out, _ = run("listen", tmp_path / "a.wav", *args)
    assert code == 0
    assert "5 replies, silent in 0 of 5 chunks" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, out, _ = run("listen", tmp_path / "a.wav", "--model", model, "--threshold", "0.999999")
    assert "·····" in out
    assert "0 replies, silent in 5 of 5 chunks" in out


def test_a_picture_is_a_png(run, tmp_path):
    code, _, err = run("listen", tmp_path / "a.wav", "--plot", tmp_path / "a.txt")
    assert code == 2 and "end its name in .png" in err


@pytest.mark.parametrize("command", [[], ["listen"], ["train"], ["eval"], ["convert"], ["demo"]])
def test_help_reads_well(run, command):
    code, out, _ = run(*command, "--help")
    assert code == 0
    assert "usage: ai-jax" in out


def test_unknown_command(run):
    code, _, _ = run("lisen")
    assert code == 2
