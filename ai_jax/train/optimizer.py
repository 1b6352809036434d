"""AdamW with linear warm-up, cosine decay, clipping, and learning rates by parameter."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ai_jax.train.stages import StageConfig, TrainConfig

LAYERS = ".layers."
"""Marks the names whose leading axis is the layer, in the stacked view."""


def make_optimizer(
    config: TrainConfig, stage: StageConfig, shapes: Mapping[str, tuple[int, ...]]
) -> optax.GradientTransformation:
    """AdamW of one stage over a flat dict of stacked parameters with these shapes.

    Decoupled weight decay on matrices and convolutions, not on norms and biases. The state holds
    moments of exactly the parameters in ``shapes``: frozen ones are never given to it.
    """
    rates = peak_rates(shapes, stage)
    factor = schedule(stage.steps, config.warmup_ratio)
    b1, b2 = config.betas
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.scale_by_adam(b1=b1, b2=b2, eps=config.eps),
        optax.add_decayed_weights(
            config.weight_decay, mask={k: decays(k, s) for k, s in shapes.items()}
        ),
        optax.stateless(lambda updates, _: {k: u * rates[k] for k, u in updates.items()}),
        optax.scale_by_schedule(lambda i: -factor(i)),
    )


def schedule(steps: int, warmup_ratio: float) -> optax.Schedule:
    """Factor of the peak rate at step i = 0..steps-1: (i + 1) / warmup, then a cosine towards 0."""
    warmup = max(1, round(steps * warmup_ratio))

    def factor(i: jax.Array) -> jax.Array:
        progress = (i + 1 - warmup) / (steps - warmup + 1)
        cosine = 0.5 * (1.0 + jnp.cos(jnp.pi * jnp.clip(progress, 0.0, 1.0)))
        return jnp.where(i < warmup, (i + 1) / warmup, cosine)

    return factor


def peak_rates(shapes: Mapping[str, tuple[int, ...]], stage: StageConfig) -> dict[str, np.ndarray]:
    """Peak rate of each parameter, float32, broadcastable to it (one rate per audio layer)."""
    layers = [s[0] for n, s in shapes.items() if n.startswith("audio_tower" + LAYERS)]
    n_layers = layers[0] if layers else 0
    rates = {}
    for name, shape in shapes.items():
        rate = stage.learning_rate
        for pattern, special in stage.learning_rates.items():
            if fnmatch.fnmatchcase(name, pattern):
                rate = special
                break
        depth = np.zeros((), np.float32)
        if name.startswith("audio_tower" + LAYERS):
            depth = np.arange(n_layers)[::-1].reshape(-1, *[1] * (len(shape) - 1))
            rate = np.where(depth < n_layers - stage.audio_frozen_layers, rate, 0.0)
        elif name.startswith("audio_tower.conv"):
            depth = np.float32(n_layers)
        rates[name] = np.asarray(rate * stage.audio_layer_decay**depth, np.float32)
    return rates


def decays(name: str, shape: tuple[int, ...]) -> bool:
    """Whether weight decay applies to this stacked parameter."""
    return len(shape) - (LAYERS in name) >= 2
