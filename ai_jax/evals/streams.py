"""Trigger accuracy: decisions chunk by chunk on composed streams, teacher-forced.

The streams are composed like those of training (several sounds and words, noise behind them), but
from recordings of another split alone. Each decision is made given the true history, so one early
or late reply counts as two wrong chunks and has no consequences.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ai_jax.config import ModelConfig
from ai_jax.data.loader import LoaderConfig, make_loader
from ai_jax.model import omni
from ai_jax.tokens import TextTokenizer
from ai_jax.train import loss, metrics

MAX_TOKENS = 1024
SEED = 2026


def trigger(
    config: ModelConfig,
    params: omni.Params,
    tokenizer: TextTokenizer,
    material: Path,
    split: str,
    streams: int,
) -> dict[str, float]:
    """Metrics of ``ai_jax.train.metrics.summarize`` over ``streams`` streams of 24 s of ``split``.

    Decisions take the likelier control token (threshold 0.5). Raises UserError as the loader does.
    """
    data = LoaderConfig(
        material=str(material), split=split, batch_size=1, max_tokens=MAX_TOKENS, seed=SEED
    )
    stacked = omni.stack_layers({k: jnp.asarray(v, jnp.float32) for k, v in params.items()})
    step = jax.jit(functools.partial(_sums, config))
    batches = make_loader(data, model=config, tokenizer=tokenizer)
    try:
        total = None
        for batch in itertools.islice(batches, streams):
            total = metrics.add(total, step(stacked, _arrays(batch)))
    finally:
        batches.close()
    return metrics.summarize(total)


def _sums(config: ModelConfig, params: omni.Params, batch: dict[str, jax.Array]) -> loss.Sums:
    hidden = omni.forward(config, params, batch["tokens"], batch["mel"])
    fmt = config.stream.format
    return loss.dual_loss(
        omni.unembed(config, params, hidden),
        batch["stream_target"],
        batch["lm_target"],
        silent=fmt.silent,
        response=fmt.response,
    )[1]


def _arrays(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {k: batch[k] for k in ("tokens", "mel", "stream_target", "lm_target")}
