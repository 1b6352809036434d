"""AdamW, its schedule and its rates against their definitions in float64."""

import jax
import numpy as np
import optax
import pytest
from tiny_run import tiny_config

from ai_jax.train.optimizer import decays, make_optimizer, peak_rates, schedule
from ai_jax.train.stages import StageConfig

SHAPES = {
    "audio_tower.conv1.weight": (4, 2, 3),
    "audio_tower.layers.fc1.weight": (3, 2, 4),
    "audio_tower.layers.fc1.bias": (3, 2),
    "audio_tower.proj.weight": (2, 4),
    "model.layers.mlp.up_proj.weight": (2, 3, 2),
    "model.layers.input_layernorm.weight": (2, 3),
    "model.norm.weight": (3,),
}


def test_schedule_rises_to_one_then_falls_to_zero():
    factor = schedule(200, 0.03)
    values = np.array([float(factor(i)) for i in range(200)])
    np.testing.assert_allclose(values[:6], np.arange(1, 7) / 6, rtol=1e-6)
    assert values.max() == values[5] == 1.0
    assert np.all(np.diff(values[5:]) < 0)
    middle = 5 + (200 - 6 + 1) / 2
    np.testing.assert_allclose(np.interp(middle, np.arange(200), values), 0.5, atol=1e-3)
    assert 0 < values[-1] < 1e-3 and factor(200) == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_schedule_of_very_short_stages_trains(steps):
    assert all(0 < float(schedule(steps, 0.03)(i)) <= 1 for i in range(steps))


def test_rates_by_pattern_and_depth():
    stage = StageConfig(
        name="s",
        steps=1,
        learning_rate=1e-3,
        learning_rates={"audio_tower.proj.*": 5e-4, "audio_tower.*": 2e-4},
        audio_layer_decay=0.5,
    )
    rates = peak_rates(SHAPES, stage)
    np.testing.assert_allclose(
        rates["audio_tower.layers.fc1.weight"].ravel(), [5e-5, 1e-4, 2e-4], rtol=1e-6
    )
    assert rates["audio_tower.layers.fc1.weight"].shape == (3, 1, 1)
    np.testing.assert_allclose(rates["audio_tower.conv1.weight"], 2e-4 / 8, rtol=1e-6)
    np.testing.assert_allclose(rates["audio_tower.proj.weight"], 5e-4, rtol=1e-6)
    np.testing.assert_allclose(rates["model.layers.mlp.up_proj.weight"], 1e-3, rtol=1e-6)


def test_weight_decay_spares_norms_and_biases():
    assert {n for n, s in SHAPES.items() if not decays(n, s)} == {
        "audio_tower.layers.fc1.bias",
        "model.layers.input_layernorm.weight",
        "model.norm.weight",
    }


def test_five_steps_equal_adamw_by_hand(tmp_path):
    config = tiny_config(tmp_path, weight_decay=0.1, clip=0.5, warmup_ratio=0.4)
    stage = StageConfig(name="s", steps=5, learning_rate=1e-2, audio_layer_decay=0.8)
    rng = np.random.default_rng(0)
    params = {k: rng.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}
    optimizer = make_optimizer(config, stage, SHAPES)
    state, got = optimizer.init(params), params
    p = {k: v.astype(np.float64) for k, v in params.items()}
    m = {k: np.zeros(s) for k, s in SHAPES.items()}
    v = {k: np.zeros(s) for k, s in SHAPES.items()}
    rates, factor = peak_rates(SHAPES, stage), schedule(5, 0.4)
    for i in range(5):
        grads = {k: rng.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}
        updates, state = jax.jit(optimizer.update)(grads, state, got)
        got = optax.apply_updates(got, updates)
        norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in grads.values()))
        for k in SHAPES:
            g = grads[k].astype(np.float64) * min(1.0, 0.5 / norm)
            m[k] = 0.9 * m[k] + 0.1 * g
            v[k] = 0.95 * v[k] + 0.05 * g * g
            step = (m[k] / (1 - 0.9 ** (i + 1))) / (np.sqrt(v[k] / (1 - 0.95 ** (i + 1))) + 1e-8)
            step += 0.1 * p[k] * decays(k, SHAPES[k])
            p[k] = p[k] - float(factor(i)) * rates[k] * step
    for k in SHAPES:
        np.testing.assert_allclose(got[k], p[k], rtol=0, atol=2e-6, err_msg=k)
