"""Strict filling of dataclasses: every fault names the file, the key and the nearest valid name."""

import dataclasses
import json

import pytest

from ai_jax.config import ModelConfig, from_dict, load, preset, to_dict
from ai_jax.errors import UserError


@pytest.mark.parametrize("name", ["tiny", "nano", "qwen2_5_omni_3b"])
def test_presets_load_and_round_trip(name):
    model = preset("model", name, ModelConfig)
    assert model.name == name
    assert from_dict(ModelConfig, to_dict(model)) == model
    assert model.chunk_samples == 6400
    assert model.chunk_seconds == 0.4
    assert model.audio.chunk_tokens == 10


def test_unknown_preset_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'nano'"):
        preset("model", "nanno", ModelConfig)


def _broken(change):
    data = to_dict(preset("model", "tiny", ModelConfig))
    change(data)
    return data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: d["audio"].update(d_modle=3),
            "audio: unknown key 'd_modle'; did you mean 'd_model'",
        ),
        (lambda d: d["text"].pop("head_dim"), "text: the key 'head_dim' is missing"),
        (lambda d: d["text"].update(head_dim="12"), "text.head_dim: expected int, got str '12'"),
        (lambda d: d["text"].update(head_dim=True), "text.head_dim: expected int, got bool True"),
        (lambda d: d["audio"].update(n_window=21), "audio: n_window must be even"),
        (lambda d: d["text"].update(num_key_value_heads=3), "must be a multiple"),
        (lambda d: d["mel"].update(normalization="clp"), "did you mean 'clip'"),
        (lambda d: d["mel"].update(n_mels=128), "audio.num_mel_bins must equal mel.n_mels"),
        (lambda d: d["stream"].update(threshold=1.5), "threshold must lie between 0 and 1"),
        (lambda d: d["stream"]["format"].update(silent=301), "four different token ids"),
        (lambda d: d["stream"]["format"].update(prefix_open=[1, "a"]), r"prefix_open\[1\]"),
        (lambda d: d.update(audio=None), "audio: expected a mapping, got NoneType"),
    ],
)
def test_faults_name_the_key(change, message):
    with pytest.raises(UserError, match=message) as e:
        from_dict(ModelConfig, _broken(change), where="x.yaml")
    assert str(e.value).startswith("x.yaml")


def test_numbers_written_as_text_by_yaml_1_1(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Rate:
        lr: float
        decay: float | None = None

    path = tmp_path / "rate.yaml"
    path.write_text("lr: 1e-4\n")
    assert load(path, Rate) == Rate(1e-4, None)


@pytest.mark.parametrize("text", ["a: [1", "- 1\n- 2", ""])
def test_files_that_are_no_mapping(tmp_path, text):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"bad\.yaml"):
        load(path, ModelConfig)


def test_missing_file(tmp_path):
    with pytest.raises(UserError, match="cannot read the config"):
        load(tmp_path / "none.yaml", ModelConfig)


def test_overrides(tmp_path):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(to_dict(preset("model", "tiny", ModelConfig))))
    model = load(path, ModelConfig, ["stream.max_len=99", "name=other", "mel.floor=-1"])
    assert (model.stream.max_len, model.name, model.mel.floor) == (99, "other", -1.0)
    for bad, says in {
        "stream.max_len": "write key.of.a.mapping=value",
        "name.first=x": "write key.of.a.mapping=value",
        "stream.max_length=9": "did you mean 'max_len'",
        "stream.max_len=[": "not valid YAML",
        "stream.max_len=soon": "expected int",
    }.items():
        with pytest.raises(UserError, match=says):
            load(path, ModelConfig, [bad])
