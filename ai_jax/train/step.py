"""One optimizer step: forward, dual loss, gradients of the trainable parameters, update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ai_jax.config import ModelConfig
from ai_jax.model import omni
from ai_jax.train.augment import spec_augment
from ai_jax.train.loss import Sums, count_targets, dual_loss, event_loss
from ai_jax.train.optimizer import make_optimizer
from ai_jax.train.stages import AUX, StageConfig, TrainConfig, partition

Params = dict[str, jax.Array]
Batch = dict[str, jax.Array]
Step = Callable[["TrainState", Batch, jax.Array], tuple["TrainState", Sums]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a step changes. Parameters are float32, stacked by layer, with those under ``aux.``.

    trainable, frozen: a partition of the parameters by the current stage. opt_state: of the
    trainable ones alone. step: int32, optimizer steps done over all stages.
    """

    trainable: Params
    frozen: Params
    opt_state: optax.OptState
    step: jax.Array

    @property
    def params(self) -> Params:
        return {**self.frozen, **self.trainable}


def start_stage(config: TrainConfig, stage: StageConfig, params: Params, step: int) -> TrainState:
    """The state before the first step of ``stage``: its partition and a fresh optimizer."""
    trainable, frozen = partition(params, stage)
    optimizer = make_optimizer(config, stage, shapes_of(trainable))
    return TrainState(trainable, frozen, optimizer.init(trainable), jnp.int32(step))


def init_aux(config: TrainConfig, model: ModelConfig, n_labels: int) -> Params:
    """Parameters that only training has: the head of the auxiliary labels, zero at first."""
    if not config.event_loss_weight:
        return {}
    weight_ld = jnp.zeros((n_labels, model.text.hidden_size), jnp.float32)
    return {AUX + "event.weight": weight_ld, AUX + "event.bias": jnp.zeros(n_labels, jnp.float32)}


def shapes_of(params: Params) -> dict[str, tuple[int, ...]]:
    return {k: v.shape for k, v in params.items()}


def data_mesh() -> Mesh:
    """All devices along one axis, over which batches are split."""
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def put_batch(batch: Mapping[str, np.ndarray], accumulation: int, mesh: Mesh) -> Batch:
    """Move a host batch [accumulation * b, ...] to [accumulation, b, ...], b split over devices."""
    sharding = NamedSharding(mesh, P(None, "data"))
    return {
        k: jax.device_put(v.reshape(accumulation, -1, *v.shape[1:]), sharding)
        for k, v in batch.items()
    }


def batch_loss(
    config: TrainConfig,
    model: ModelConfig,
    params: Params,
    batch: Batch,
    audio_frozen_layers: int = 0,
) -> tuple[jax.Array, jax.Array, Sums]:
    """Numerators of the dual and the auxiliary loss, and sums for metrics, of a batch [b, ...]."""
    weights = {k: v for k, v in params.items() if not k.startswith(AUX)}
    hidden_btd = omni.forward(
        model,
        weights,
        batch["tokens"],
        batch["mel"],
        dtype=jnp.dtype(config.dtype),
        remat=config.remat,
        scan=config.scan,
        frozen_layers=audio_frozen_layers,
    )
    dual, sums = dual_loss(
        omni.unembed(model, weights, hidden_btd),
        batch["stream_target"],
        batch["lm_target"],
        silent=model.stream.format.silent,
        response=model.stream.format.response,
        lambda_stream=config.lambda_stream,
        response_weight=config.response_weight,
    )
    if not config.event_loss_weight:
        return dual, jnp.float32(0.0), sums
    event, event_n = event_loss(
        hidden_btd.astype(jnp.float32),
        batch["stream_target"],
        batch["event_target"],
        params[AUX + "event.weight"],
        params[AUX + "event.bias"],
    )
    return dual, event, {**sums, "event_nll": event, "event_n": event_n}


def make_train_step(
    config: TrainConfig,
    model: ModelConfig,
    stage: StageConfig,
    shapes: Mapping[str, tuple[int, ...]],
    mesh: Mesh,
) -> Step:
    """The compiled ``step(state, batch, key) -> (state, sums)``; the old state is donated.

    shapes: of the trainable parameters. batch: from :func:`put_batch`. key: the run's; the step
    folds its number in, so randomness depends on (seed, step) alone. The loss is divided by N of
    the whole batch, over all devices and accumulation steps, and the auxiliary loss by the number
    of its decisions. sums: over all rows, and ``grad_norm`` before clipping.
    """
    optimizer = make_optimizer(config, stage, shapes)

    def step(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, Sums]:
        n = count_targets(batch["stream_target"], batch["lm_target"])
        n_decisions = jnp.sum(batch["stream_target"][..., 1:] >= 0, dtype=jnp.float32)

        def micro_loss(trainable: Params, micro: Batch, key: jax.Array) -> tuple[jax.Array, Sums]:
            mel = spec_augment(micro["mel"], key, config.spec_augment)
            params = {**state.frozen, **trainable}
            micro = {**micro, "mel": mel}
            dual, event, sums = batch_loss(config, model, params, micro, stage.audio_frozen_layers)
            return dual / n + config.event_loss_weight * event / n_decisions, sums

        def accumulate(total, micro_and_key):
            grads_and_sums = jax.grad(micro_loss, has_aux=True)(state.trainable, *micro_and_key)
            return jax.tree.map(jnp.add, total, grads_and_sums), None

        keys = jax.random.split(jax.random.fold_in(key, state.step), config.accumulation)
        first = jax.tree.map(lambda x: x[0], (batch, keys))
        like = jax.eval_shape(jax.grad(micro_loss, has_aux=True), state.trainable, *first)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        (grads, sums), _ = jax.lax.scan(accumulate, zeros, (batch, keys))

        updates, opt_state = optimizer.update(grads, state.opt_state, state.trainable)
        trainable = optax.apply_updates(state.trainable, updates)
        new_state = TrainState(trainable, state.frozen, opt_state, state.step + 1)
        return new_state, {**sums, "grad_norm": optax.tree.norm(grads)}

    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, "data"))
    return jax.jit(step, in_shardings=(whole, split, whole), out_shardings=whole, donate_argnums=0)


def make_eval_step(
    config: TrainConfig, model: ModelConfig, mesh: Mesh
) -> Callable[[Params, Batch], Sums]:
    """The compiled ``sums(params, batch)`` of one micro-batch, without augmentation."""

    def sums_of(params: Params, batch: Batch) -> Sums:
        first = {k: v[0] for k, v in batch.items()}
        return batch_loss(config, model, params, first)[2]

    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, "data"))
    return jax.jit(sums_of, in_shardings=(whole, split), out_shardings=whole)
