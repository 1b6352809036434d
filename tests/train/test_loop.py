"""Whole runs at tiny scale: kill and resume, time limit, devices, initial weights, export."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_run import LABELS, planner, tiny_config

from ai_jax.config import ModelConfig, preset
from ai_jax.convert.load import load
from ai_jax.errors import UserError
from ai_jax.model import omni
from ai_jax.train import init
from ai_jax.train.loop import train

SCRIPT = Path(__file__).with_name("tiny_run.py")
STREAMS = {"planner": planner, "labels": LABELS}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that nothing interrupted, and its exported model."""
    folder = tmp_path_factory.mktemp("run")
    out = folder / "run"
    summary = train(tiny_config(folder), out, export=folder / "hf", **STREAMS)
    return out, folder / "hf", summary


def rows(run):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def without_time(row):
    return {k: v for k, v in row.items() if k != "audio_per_s"}


def start_process(run, *arguments):
    """The same run in another process, which takes over the compiled programs of this one."""
    env = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    command = [sys.executable, SCRIPT, run, *arguments]
    return subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)


def assert_same_weights(a, b):
    a, b = load(a), load(b)
    assert a.params.keys() == b.params.keys()
    for name, value in a.params.items():
        assert value.tobytes() == b.params[name].tobytes(), name


def test_a_run_ends_with_everything_in_place(finished):
    run, exported, summary = finished
    assert (summary.step, summary.complete, summary.best_step) == (8, True, 8)
    logged = [r for r in rows(run) if "loss" in r]
    assert [r["step"] for r in logged] == list(range(1, 9))
    assert {r["stage"] for r in logged} == {"decoder", "all"}
    assert all(np.isfinite(r["loss"]) and r["audio_per_s"] > 0 for r in logged)
    assert [r["step"] for r in rows(run) if "val_loss" in r] == [4, 8]
    assert sorted(p.name for p in run.iterdir() if p.name.isdigit()) == ["2", "4", "6", "8"]
    trained, shipped = load(run), load(exported, np.float32)
    assert trained.info["step"] == 8
    assert not any(name.startswith("aux.") for name in trained.params)
    for name, value in trained.params.items():  # exported as bfloat16: 8 bits of mantissa
        np.testing.assert_allclose(shipped.params[name], value, rtol=2**-8, err_msg=name)


def test_a_stage_moves_what_it_trains_and_nothing_else(finished):
    trained = load(finished[0] / "2"), load(finished[0])
    start = omni.init_params(trained[0].config, 0)
    decoder, everything = (
        {name for name, value in model.params.items() if not np.array_equal(value, start[name])}
        for model in trained
    )
    tower = {n for n in start if n.startswith("audio_tower.") and ".proj." not in n}
    assert decoder == set(start) - tower
    assert everything == set(start)


@pytest.mark.parametrize("after", [3, 7])
def test_a_killed_run_resumes_bit_exactly(finished, tmp_path, after):
    run = tmp_path / "run"
    process = start_process(run)
    limit = time.monotonic() + 300
    while not (run / "metrics.jsonl").exists() or len(rows(run)) < after:
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.01)
    process.kill()
    process.wait()
    # What a kill in the middle of a save leaves behind.
    (run / "7.orbax-checkpoint-tmp" / "params").mkdir(parents=True, exist_ok=True)
    assert train(tiny_config(tmp_path), run, **STREAMS).complete
    assert_same_weights(run, finished[0])
    assert [without_time(r) for r in rows(run)] == [without_time(r) for r in rows(finished[0])]
    assert not (run / "7.orbax-checkpoint-tmp").exists()


def test_a_time_limit_saves_and_a_later_call_goes_on(finished, tmp_path):
    run = tmp_path / "run"
    first = train(tiny_config(tmp_path), run, minutes=0, export=tmp_path / "hf", **STREAMS)
    assert not first.complete and first.step == 0
    assert not (tmp_path / "hf").exists()
    assert load(run).info["step"] == 0
    assert train(tiny_config(tmp_path), run, **STREAMS).complete
    assert_same_weights(run, finished[0])


def test_a_run_goes_on_only_with_its_own_config(finished, tmp_path):
    config = tiny_config(finished[0].parent)
    train(dataclasses.replace(config, log_every=5), finished[0], **STREAMS)
    with pytest.raises(UserError, match="another 'clip'"):
        train(dataclasses.replace(config, clip=2.0), finished[0], **STREAMS)


def test_two_devices_compute_the_same(finished, tmp_path):
    """The first stage alone, batches split over two CPU devices, in a process of its own."""
    start_process(tmp_path / "run", "two_devices").wait()
    ours, theirs = rows(tmp_path / "run"), rows(finished[0])
    assert len(ours) == 3
    for two, one in zip(ours, theirs, strict=False):
        assert two["loss"] == pytest.approx(one["loss"], abs=1e-4)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)


def test_init_takes_what_a_file_has(tmp_path):
    model = preset("model", "tiny", ModelConfig)
    tower = {
        name: np.full(value.shape, 0.5, np.float16)
        for name, value in omni.init_params(model, 1).items()
        if name.startswith("audio_tower.layers.")
    }
    save_file(tower, tmp_path / "tower.safetensors")
    config = tiny_config(tmp_path)
    data = dataclasses.replace(config.data, material=str(tmp_path))
    start = init.start(dataclasses.replace(config, init="tower.safetensors", data=data))
    assert start.loaded == tuple(sorted(tower))
    random = omni.init_params(model, 0)
    for name, value in start.params.items():
        want = 0.5 if name in tower else random[name]
        np.testing.assert_array_equal(value, np.broadcast_to(want, value.shape), err_msg=name)


@pytest.mark.parametrize(
    "tensors, message",
    [
        ({"audio_tower.conv9.weight": (2, 2)}, "no tensor 'audio_tower.conv9.weight'"),
        ({"lm_head.weight": (3, 3)}, r"'lm_head.weight' has shape \[3, 3\]"),
    ],
)
def test_an_init_that_does_not_fit_is_an_error(tmp_path, tensors, message):
    path = tmp_path / "odd.safetensors"
    save_file({k: np.zeros(s, np.float32) for k, s in tensors.items()}, path)
    with pytest.raises(UserError, match=message):
        init.start(tiny_config(tmp_path, init=str(path)))


def test_a_missing_init_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"there is no nowhere.safetensors"):
        init.start(tiny_config(tmp_path, init="nowhere.safetensors"))


def test_a_tokenizer_of_another_model_is_an_error(tmp_path):
    with pytest.raises(UserError, match="tokenizer"):
        init.start(tiny_config(tmp_path, tokenizer=None))
