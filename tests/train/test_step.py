"""The optimizer step at tiny scale: what moves, what does not, and that batches add up."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from tiny_run import LABELS, planner, tiny_config

from ai_jax.config import ModelConfig, preset
from ai_jax.data.loader import Examples
from ai_jax.model import omni
from ai_jax.tokens import TextTokenizer
from ai_jax.train import metrics
from ai_jax.train import step as steps
from ai_jax.train.stages import SpecAugmentConfig, StageConfig

MODEL = preset("model", "tiny", ModelConfig)
KEY = jax.random.key(0)
EVERYTHING = StageConfig(name="all", steps=60, learning_rate=1e-2)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("step")
    return tiny_config(folder, spec_augment=SpecAugmentConfig(), warmup_ratio=0.0)


@pytest.fixture(scope="module")
def batch(config):
    """Four streams with different numbers of supervised positions."""
    tokenizer = TextTokenizer.from_file(config.tokenizer)
    make = Examples(config.data, MODEL, tokenizer, planner, LABELS)
    rows = [make(i) for i in range(4)]
    rows[0]["lm_target"] = np.full_like(rows[0]["lm_target"], -1)
    return {k: np.stack([r[k] for r in rows]) for k in rows[0]}


def run(config, batch, stage, n_steps=1):
    mesh = steps.data_mesh()
    params = omni.stack_layers(omni.init_params(MODEL, 0))
    params |= steps.init_aux(config, MODEL, len(LABELS))
    state = steps.start_stage(config, stage, params, 0)
    shapes = steps.shapes_of(state.trainable)
    train_step = steps.make_train_step(config, MODEL, stage, shapes, mesh)
    history = []
    for _ in range(n_steps):
        state, sums = train_step(state, steps.put_batch(batch, config.accumulation, mesh), KEY)
        history.append(metrics.add(None, sums))
    return state, history


def test_frozen_parameters_have_no_optimizer_state(config):
    params = omni.stack_layers(omni.init_params(MODEL, 0))
    state = steps.start_stage(config, config.stages[0], params, 0)
    assert any(k.startswith("audio_tower.layers.") for k in state.frozen)
    adam = next(s for s in state.opt_state if isinstance(s, optax.ScaleByAdamState))
    assert set(adam.mu) == set(adam.nu) == set(state.trainable)
    assert not set(state.trainable) & set(state.frozen)


def test_accumulated_micro_batches_equal_one_batch(config, batch):
    whole, (a,) = run(config, batch, EVERYTHING)
    data = dataclasses.replace(config.data, batch_size=4)
    accumulating = dataclasses.replace(config, accumulation=2, data=data)
    parts, (b,) = run(accumulating, batch, EVERYTHING)
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert value == pytest.approx(b[name], rel=1e-5), name
    # Adam's first step is +-rate wherever the gradient is far from 0: compare the moments.
    mu = [next(s for s in x.opt_state if hasattr(s, "mu")).mu for x in (whole, parts)]
    for name in mu[0]:
        np.testing.assert_allclose(mu[0][name], mu[1][name], atol=1e-7, rtol=1e-4, err_msg=name)


def test_learns_one_batch_by_heart(config, batch):
    _, history = run(config, batch, EVERYTHING, EVERYTHING.steps)
    first, last = metrics.summarize(history[0]), metrics.summarize(history[-1])
    assert first["loss"] > 5 and last["loss"] < 0.1
    assert last["trigger_accuracy"] == last["text_accuracy"] == 1.0
    assert last["loss_event"] < first["loss_event"]
