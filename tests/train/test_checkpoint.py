"""Which checkpoints of a run stay on disk."""

import jax
import pytest
from tiny_run import tiny_config

from ai_jax.config import ModelConfig, preset
from ai_jax.errors import UserError
from ai_jax.model import omni
from ai_jax.train.checkpoint import Checkpoints
from ai_jax.train.step import start_stage

MODEL = preset("model", "tiny", ModelConfig)


def test_the_latest_and_the_best_are_kept(tmp_path):
    config = tiny_config(tmp_path, keep=1, event_loss_weight=0.0)
    run = tmp_path / "run"
    checkpoints = Checkpoints(run, config, MODEL, tmp_path / "tokenizer.json", {})
    params = omni.stack_layers(omni.init_params(MODEL, 0))
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: None, 5: float("nan")}
    for step, loss in losses.items():
        state = start_stage(config, config.stages[0], params, step)
        checkpoints.save(state, jax.random.key(0), None if loss is None else {"loss": loss})
    assert (checkpoints.latest, checkpoints.best) == (5, 2)
    checkpoints.close()
    assert {int(p.name) for p in run.iterdir() if p.name.isdigit()} == {2, 5}


def test_another_config_is_refused(tmp_path):
    config = tiny_config(tmp_path)
    tokenizer = tmp_path / "tokenizer.json"
    Checkpoints(tmp_path / "run", config, MODEL, tokenizer, {}).close()
    free = tiny_config(tmp_path, log_every=7, keep=9)
    Checkpoints(tmp_path / "run", free, MODEL, tokenizer, {}).close()
    with pytest.raises(UserError, match="another 'seed'"):
        Checkpoints(tmp_path / "run", tiny_config(tmp_path, seed=1), MODEL, tokenizer, {})
