"""Checkpoints of a run: everything that it needs to go on as if it had never stopped.

``<run>/`` holds ``ai_jax.json`` (model config), ``hf/tokenizer.json``, ``train.json`` (the
resolved training config) and ``<run>/<step>/`` with the Orbax checkpointables ``params`` (flat,
unstacked, under Hugging Face's names: ``ai_jax.convert.load`` reads it), ``optimizer`` and
``train``. A checkpoint takes its name when it is complete, so a kill leaves the one before.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

from ai_jax.config import ModelConfig, to_dict
from ai_jax.convert.files import INFO, write_info, write_json
from ai_jax.errors import UserError
from ai_jax.model import omni
from ai_jax.train.stages import AUX, TrainConfig
from ai_jax.train.step import Params, TrainState, start_stage

TRAIN = "train.json"
# What a resumed run may change: none of it alters what is computed from the same data.
_FREE = ("log_every", "eval_every", "eval_batches", "checkpoint_every", "keep", "cpu_devices")
_FREE_DATA = ("material", "workers", "prefetch")


class Checkpoints:
    """The checkpoints of one run.

    Opening a new run folder writes its configs. Opening an old one checks that the training config
    is the same (UserError names the first key that differs).
    """

    def __init__(
        self,
        run_dir: Path,
        config: TrainConfig,
        model: ModelConfig,
        tokenizer_path: Path,
        provenance: dict[str, Any],
    ):
        self._config = config
        run_dir = run_dir.absolute()
        run_dir.mkdir(parents=True, exist_ok=True)
        if (run_dir / TRAIN).exists():
            _check_same(config, run_dir / TRAIN)
        else:
            (run_dir / "hf").mkdir(exist_ok=True)
            shutil.copyfile(tokenizer_path, run_dir / "hf" / "tokenizer.json")
            write_info(run_dir / INFO, model, provenance)
            partial = run_dir / f"{TRAIN}.partial"
            write_json(partial, to_dict(config))
            partial.rename(run_dir / TRAIN)  # last and at once: what it marks is complete
        keep = ocp.training.preservation_policies
        best = keep.BestN(
            get_metric_fn=lambda metrics: metrics["loss"],
            reverse=True,
            n=1,
            keep_checkpoints_without_metrics=False,
        )
        self._orbax = ocp.training.Checkpointer(
            run_dir,
            preservation_policy=keep.AnyPreservationPolicy([keep.LatestN(config.keep), best]),
            cleanup_tmp_directories=True,
        )

    @property
    def latest(self) -> int | None:
        """Optimizer steps done at the latest checkpoint, or None."""
        return None if self._orbax.latest is None else self._orbax.latest.step

    @property
    def best(self) -> int | None:
        """Step of the checkpoint with the least evaluated loss, or None."""
        scored = [c for c in self._orbax.checkpoints if c.metrics]
        return min(scored, key=lambda c: c.metrics["loss"]).step if scored else None

    def save(self, state: TrainState, key: jax.Array, metrics: dict[str, float] | None) -> None:
        """Write the state and wait until it is safe on disk. metrics: of an evaluation, if any."""
        step = int(state.step)
        if metrics is not None and not np.isfinite(metrics["loss"]):
            metrics = None  # cannot be ranked
        self._orbax.save_checkpointables(
            step,
            _contents(self._config, self._stage_at(step), state, key),
            force=True,
            metrics=metrics and {k: v for k, v in metrics.items() if np.isfinite(v)},
        )

    def restore(self, params: Params, mesh: Mesh) -> tuple[TrainState, jax.Array]:
        """The latest checkpoint's state and key. params: stacked, for their names and shapes."""
        step, config = self.latest, self._config
        assert step is not None, "restore() without a checkpoint"
        index = self._stage_at(step)
        stage = config.stages[index]

        def like(params: Params) -> dict[str, Any]:
            state = start_stage(config, stage, params, step)
            return _contents(config, index, state, jax.random.key(config.seed))

        whole = NamedSharding(mesh, P())
        want = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole),
            jax.eval_shape(like, params),
        )
        # The last step of a stage is followed by the next one, whose optimizer starts afresh.
        begins = step == config.stage_start(index)
        if begins:
            del want["optimizer"]
        got = self._orbax.load_checkpointables(step, want)
        train = got["train"]
        state = start_stage(config, stage, omni.stack_layers(got["params"]) | train["aux"], step)
        if not begins:
            state = dataclasses.replace(state, opt_state=got["optimizer"])
        if int(train["examples"]) != step * config.data.batch_size:
            raise UserError(f"the checkpoint at step {step} is not of this run; use another --out")
        return jax.device_put(state, whole), jax.random.wrap_key_data(train["key"])

    def _stage_at(self, step: int) -> int:
        """The stage that goes on from ``step``; after the end, the last one."""
        return self._config.stage_at(min(step, self._config.steps - 1))

    def close(self) -> None:
        self._orbax.close()


def _contents(config: TrainConfig, stage: int, state: TrainState, key: jax.Array) -> dict[str, Any]:
    """The checkpointables: weights, optimizer, and where the run is in steps, data and PRNG."""
    aux = {k: v for k, v in state.params.items() if k.startswith(AUX)}
    weights = {k: v for k, v in state.params.items() if k not in aux}
    return {
        "params": omni.unstack_layers(weights),
        "optimizer": state.opt_state,
        "train": {
            "step": state.step,
            "stage": jnp.int32(stage),
            "examples": state.step * config.data.batch_size,
            "key": jax.random.key_data(key),
            "aux": aux,
        },
    }


def _check_same(config: TrainConfig, path: Path) -> None:
    old = json.loads(path.read_text(encoding="utf-8"))
    new = json.loads(json.dumps(to_dict(config)))
    for a in (old, new):
        for key in _FREE:
            a.pop(key, None)
        for key in _FREE_DATA:
            a["data"].pop(key, None)
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            raise UserError(
                f"{path.parent} holds a run with another '{key}'; go on with its own config "
                f"({path}) or choose another --out"
            )
