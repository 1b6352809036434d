"""What a training run is: its configuration, its stages, and which parameters each stage trains."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
from collections.abc import Iterable
from typing import Literal, TypeVar

from ai_jax.data.loader import LoaderConfig
from ai_jax.errors import UserError

V = TypeVar("V")

AUX = "aux."
"""Prefix of parameters that only training has: kept in its checkpoints, never exported."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageConfig:
    """One stage: fresh optimizer, its own warm-up and cosine over ``steps`` optimizer steps.

    trainable: shell-style patterns of parameter names, without the layer number
    (``model.layers.self_attn.q_proj.weight``); the rest is frozen. learning_rates: peak rate for
    names that match a pattern, first match wins; others take ``learning_rate``. audio_layer_decay:
    the rate of audio layer i is multiplied by decay^(layers - 1 - i), of the convolutions by
    decay^layers; ``ln_post`` and ``proj`` keep the full rate. audio_frozen_layers: the first so
    many layers of the audio tower stay as they are and cost no backward pass, provided that the
    convolutions are not trainable either.
    """

    name: str
    steps: int
    learning_rate: float
    trainable: tuple[str, ...] = ("*",)
    learning_rates: dict[str, float] = dataclasses.field(default_factory=dict)
    audio_layer_decay: float = 1.0
    audio_frozen_layers: int = 0

    def __post_init__(self) -> None:
        _require(self.steps > 0, f"stage '{self.name}': steps must be >= 1")
        _require(self.learning_rate > 0, f"stage '{self.name}': learning_rate must be > 0")
        _require(bool(self.trainable), f"stage '{self.name}': trainable must not be empty")
        _require(0 < self.audio_layer_decay <= 1, "audio_layer_decay must lie in (0, 1]")
        _require(self.audio_frozen_layers >= 0, "audio_frozen_layers must be >= 0")
        for pattern, rate in self.learning_rates.items():
            _require(rate > 0, f"the learning rate of '{pattern}' must be > 0; freeze it instead")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecAugmentConfig:
    """Masks over the log-mel of each stream, filled with the stream's mean; 0 masks is off.

    Widths are maxima: a mask covers uniform(0, width) frames or mel bins.
    """

    time_masks: int = 0
    time_width: int = 20
    mel_masks: int = 0
    mel_width: int = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run.

    model: name of a preset in ``configs/model``, or path of a model YAML. init: a model folder, a
    checkpoint, or a .safetensors file with some of our tensors (a relative path may also lie in the
    material folder); what it lacks starts at random. tokenizer: path of a ``tokenizer.json``;
    without it, that of ``init``, else that of the built-in model.

    data: its ``batch_size`` counts the streams of one optimizer step, over all devices;
    ``accumulation`` cuts them into so many micro-batches. lambda_stream, response_weight,
    event_loss_weight: weights of the decision term, of decisions to respond, of the auxiliary
    labels. clip: largest global norm of the gradient. dtype: of the computation; master weights
    are float32. remat: recompute activations in the backward pass (less memory, more time). scan:
    loop over layers (False unrolls: faster on CPU, compiles longer).

    log_every, eval_every, checkpoint_every: optimizer steps; 0 is never, but the end always saves.
    keep: latest checkpoints kept, besides the best evaluated one. cpu_devices: cut the CPU into
    this many devices.
    """

    model: str
    init: str | None = None
    tokenizer: str | None = None
    data: LoaderConfig
    stages: tuple[StageConfig, ...]
    accumulation: int = 1
    lambda_stream: float = 1.0
    response_weight: float = 1.0
    event_loss_weight: float = 0.0
    spec_augment: SpecAugmentConfig = SpecAugmentConfig()
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float = 1.0
    warmup_ratio: float = 0.03
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    remat: bool = True
    scan: bool = True
    log_every: int = 10
    eval_every: int = 0
    eval_batches: int = 8
    checkpoint_every: int = 500
    keep: int = 2
    seed: int = 0
    cpu_devices: int | None = None

    def __post_init__(self) -> None:
        _require(bool(self.stages), "a run needs at least one stage")
        for name in ("accumulation", "log_every", "keep", "eval_batches"):
            _require(getattr(self, name) >= 1, f"{name} must be >= 1")
        for name in ("lambda_stream", "response_weight", "event_loss_weight", "weight_decay"):
            _require(getattr(self, name) >= 0, f"{name} must be >= 0")
        for name in ("eval_every", "checkpoint_every", "seed"):
            _require(getattr(self, name) >= 0, f"{name} must be >= 0")
        _require(0 <= self.warmup_ratio < 1, "warmup_ratio must lie in [0, 1)")
        _require(self.clip > 0, "clip must be > 0")
        _require(self.cpu_devices is None or self.cpu_devices >= 1, "cpu_devices must be >= 1")
        _require(
            self.data.batch_size % self.accumulation == 0,
            "data.batch_size must be a multiple of accumulation",
        )

    @property
    def steps(self) -> int:
        """Optimizer steps of all stages."""
        return sum(s.steps for s in self.stages)

    @property
    def micro_batch(self) -> int:
        """Streams that are in the devices' memory at once."""
        return self.data.batch_size // self.accumulation

    def stage_at(self, step: int) -> int:
        """Index of the stage that performs optimizer step ``step`` (counted from 0)."""
        end = 0
        for i, stage in enumerate(self.stages):
            end += stage.steps
            if step < end:
                return i
        raise ValueError(f"step {step} is past the last stage")

    def stage_start(self, index: int) -> int:
        """First optimizer step of stage ``index``."""
        return sum(s.steps for s in self.stages[:index])


def select(names: Iterable[str], patterns: Iterable[str]) -> set[str]:
    """The names that match a pattern, and those under ``aux.``, which always train.

    Raises UserError for a pattern that matches nothing, naming the nearest parameter.
    """
    names = list(names)
    chosen = {n for n in names if n.startswith(AUX)}
    for pattern in patterns:
        matches = fnmatch.filter(names, pattern)
        if not matches:
            close = difflib.get_close_matches(pattern, names, n=1, cutoff=0.3)
            hint = f"; the nearest is '{close[0]}'" if close else ""
            raise UserError(f"no parameter matches the trainable pattern '{pattern}'{hint}")
        chosen.update(matches)
    return chosen


def partition(params: dict[str, V], stage: StageConfig) -> tuple[dict[str, V], dict[str, V]]:
    """Split stacked parameters into those that ``stage`` trains and those that it freezes."""
    chosen = select(params, stage.trainable)
    trainable = {k: v for k, v in params.items() if k in chosen}
    return trainable, {k: v for k, v in params.items() if k not in chosen}


def _require(ok: bool, rule: str) -> None:
    if not ok:
        raise UserError(rule)
