"""Stages: which step belongs to which, which parameters train, and what a config may not say."""

import dataclasses
import importlib.resources as resources

import pytest
from tiny_run import tiny_config

from ai_jax.config import from_dict, preset, to_dict
from ai_jax.errors import UserError
from ai_jax.train.stages import StageConfig, TrainConfig, partition

NAMES = (
    *("audio_tower.layers.fc1.weight", "audio_tower.ln_post.weight", "audio_tower.proj.weight"),
    *("model.layers.mlp.up_proj.weight", "lm_head.weight", "aux.event.weight"),
)


def stage(*patterns):
    return StageConfig(name="s", steps=1, learning_rate=1e-3, trainable=patterns)


def test_each_step_belongs_to_its_stage(tmp_path):
    config = tiny_config(tmp_path)
    assert [config.stage_at(i) for i in range(config.steps)] == [0] * 3 + [1] * 5
    assert [config.stage_start(i) for i in range(2)] == [0, 3]
    with pytest.raises(ValueError):
        config.stage_at(8)


def test_partition_is_one_and_aux_always_trains():
    params = dict.fromkeys(NAMES, 0)
    trainable, frozen = partition(params, stage("model.*", "audio_tower.proj.*"))
    assert trainable.keys() | frozen.keys() == params.keys()
    assert set(trainable) == {NAMES[2], NAMES[3], NAMES[5]}


def test_a_pattern_without_parameters_is_an_error():
    with pytest.raises(UserError, match=r"lm_haed.*nearest is 'lm_head.weight'"):
        partition(dict.fromkeys(NAMES, 0), stage("lm_haed.*"))


def test_presets_load_and_survive_a_round_trip():
    for path in resources.files("ai_jax.configs.train").iterdir():
        if path.name.endswith(".yaml"):
            config = preset("train", path.name[:-5], TrainConfig)
            assert from_dict(TrainConfig, to_dict(config)) == config


@pytest.mark.parametrize(
    "change, message",
    [
        ({"stages": ()}, "at least one stage"),
        ({"accumulation": 3}, "multiple of accumulation"),
        ({"warmup_ratio": 1.0}, "warmup_ratio"),
        ({"cpu_devices": 0}, "cpu_devices"),
    ],
)
def test_impossible_settings_are_errors(tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(tiny_config(tmp_path), **change)


def test_a_misspelt_key_names_the_nearest(tmp_path):
    data = to_dict(tiny_config(tmp_path))
    data["stages"][1]["learning_rat"] = 1.0
    with pytest.raises(UserError, match="did you mean 'learning_rate'"):
        from_dict(TrainConfig, data)
