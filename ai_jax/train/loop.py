"""A training run from its configuration to its last checkpoint."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ai_jax.data.loader import Batch, LoaderConfig, make_loader
from ai_jax.errors import UserError
from ai_jax.model import omni
from ai_jax.train import init, metrics
from ai_jax.train import step as steps
from ai_jax.train.checkpoint import Checkpoints
from ai_jax.train.export import export as write_export
from ai_jax.train.export import provenance
from ai_jax.train.progress import TrainProgress, describe
from ai_jax.train.stages import StageConfig, TrainConfig


@dataclasses.dataclass(frozen=True)
class Summary:
    """How a run ended.

    step: optimizer steps done; complete: whether those were all. seconds: of this call. best_step:
    checkpoint with the least validation loss, None without validation. metrics: of the last
    validation, or else the last that were logged.
    """

    run_dir: Path
    step: int
    complete: bool
    seconds: float
    best_step: int | None
    metrics: dict[str, float]


def train(
    config: TrainConfig,
    run_dir: Path,
    *,
    minutes: float | None = None,
    export: Path | None = None,
    **loader_options: Any,
) -> Summary:
    """Train until the last stage ends, from the latest checkpoint of ``run_dir`` if it has one.

    minutes: save and return after this time; a later call goes on. export: when training is
    complete, also write the model there in Hugging Face format. loader_options: for
    :func:`ai_jax.data.loader.make_loader` (another planner and its labels). Raises UserError for
    settings that do not fit together or a loss that is not finite.
    """
    return _Run(config, Path(run_dir), loader_options).run(minutes, export)


class _Run:
    def __init__(self, config: TrainConfig, run_dir: Path, loader_options: dict[str, Any]):
        _use_cpu_devices(config.cpu_devices)
        self.began = time.monotonic()
        self.config = config
        self.run_dir = run_dir
        self.mesh = steps.data_mesh()
        if config.micro_batch % self.mesh.size:
            raise UserError(
                f"a micro-batch of {config.micro_batch} streams cannot be split over "
                f"{self.mesh.size} devices; change data.batch_size or accumulation"
            )
        self.start = init.start(config)
        self.model = self.start.model
        self.loader_options = loader_options
        self.step_seconds = config.data.batch_size * config.data.chunks * self.model.chunk_seconds
        self.eval_batches = self._eval_batches() if config.eval_every else []
        self.eval_step = steps.make_eval_step(config, self.model, self.mesh)
        facts = provenance(config, self.start)
        tokenizer = self.start.tokenizer_path
        self.checkpoints = Checkpoints(run_dir, config, self.model, tokenizer, facts)
        self.last: dict[str, float] = {}

    def run(self, minutes: float | None, export: Path | None) -> Summary:
        config = self.config
        deadline = math.inf if minutes is None else self.began + 60 * minutes
        state, self.key = self._first_state()
        step = int(state.step)
        self.file = metrics.MetricsFile(self.run_dir / "metrics.jsonl", step)
        with TrainProgress(config.steps) as self.progress:
            self.progress.say(self._opening(step))
            batches = self._loader(config.data, step * config.data.batch_size)
            try:
                while step < config.steps and time.monotonic() < deadline:
                    state = self._stage(state, batches, deadline)
                    step = int(state.step)
            finally:
                _close(batches)
            if step != self.checkpoints.latest:
                self._save(state, evaluate=bool(config.eval_every))
        complete = step == config.steps
        if complete and export is not None:
            write_export(config, self.start, state.params, self.last, export)
        best = self.checkpoints.best
        self.checkpoints.close()
        seconds = time.monotonic() - self.began
        return Summary(self.run_dir, step, complete, seconds, best, self.last)

    def _first_state(self) -> tuple[steps.TrainState, jax.Array]:
        """State and PRNG key: of the latest checkpoint, or those that a new run starts from."""
        config = self.config
        params = omni.stack_layers(self.start.params) | steps.init_aux(
            config, self.model, self._label_count()
        )
        for stage in config.stages:  # a misspelt pattern shows now, not when its stage begins
            steps.partition(params, stage)
        if self.checkpoints.latest is not None:
            return self.checkpoints.restore(params, self.mesh)
        return self._start_stage(config.stages[0], params, 0), jax.random.key(config.seed)

    def _start_stage(self, stage: StageConfig, params: steps.Params, step: int) -> steps.TrainState:
        state = steps.start_stage(self.config, stage, params, step)
        return jax.device_put(state, NamedSharding(self.mesh, P()))

    def _stage(
        self, state: steps.TrainState, batches: Iterator[Batch], deadline: float
    ) -> steps.TrainState:
        """Train to the end of the current stage, or to the deadline."""
        config, step = self.config, int(state.step)
        index = config.stage_at(step)
        stage, begin = config.stages[index], config.stage_start(index)
        if step == begin:
            state = self._start_stage(stage, state.params, step)
        shapes = steps.shapes_of(state.trainable)
        train_step = steps.make_train_step(config, self.model, stage, shapes, self.mesh)
        first = next(batches)
        # Compiled ahead, so that it does not count as time of training.
        train_step = train_step.lower(state, self._put(first), self.key).compile()
        meter = metrics.Meter(config.lambda_stream)
        for batch in itertools.chain([first], batches):
            state, sums = train_step(state, self._put(batch), self.key)
            step += 1
            meter.update(sums, self.step_seconds)
            self.progress.step(step, stage.name)
            if step % config.log_every == 0 or step == begin + stage.steps:
                self._log(step, stage.name, meter.report())
            evaluate = _due(step, config.eval_every)
            if evaluate or _due(step, config.checkpoint_every):
                with meter.paused():
                    self._save(state, evaluate)
            if step == begin + stage.steps or time.monotonic() >= deadline:
                break
        return state

    def _put(self, batch: Batch) -> steps.Batch:
        return steps.put_batch(batch, self.config.accumulation, self.mesh)

    def _log(self, step: int, stage: str, report: dict[str, float]) -> None:
        if not math.isfinite(report["loss"]):
            raise UserError(
                f"the loss is not finite at step {step}; lower the learning rate and start again "
                "with another --out (init may be the last checkpoint)"
            )
        eta = (self.config.steps - step) * self.step_seconds / report["audio_per_s"]
        self.progress.report(step, stage, report, eta)
        self.file.write({"step": step, "stage": stage, **report})
        self.last = report

    def _save(self, state: steps.TrainState, evaluate: bool) -> None:
        result = None
        if evaluate:
            self.last = result = self._evaluate(state)
            step = int(state.step)
            self.progress.say(f"validation at step {step}: {describe(result)}")
            self.file.write({"step": step, **{f"val_{k}": v for k, v in result.items()}})
        self.checkpoints.save(state, self.key, result)

    def _evaluate(self, state: steps.TrainState) -> dict[str, float]:
        total = None
        for batch in self.eval_batches:
            sums = self.eval_step(state.params, steps.put_batch(batch, 1, self.mesh))
            total = metrics.add(total, sums)
        return metrics.summarize(total, self.config.lambda_stream)

    def _eval_batches(self) -> list[Batch]:
        """The same validation streams at every evaluation, composed once."""
        size = self.config.micro_batch
        data = dataclasses.replace(self.config.data, split="val", batch_size=size, workers=0)
        batches = self._loader(data, 0)
        try:
            return list(itertools.islice(batches, self.config.eval_batches))
        finally:
            _close(batches)

    def _loader(self, data: LoaderConfig, start: int) -> Iterator[Batch]:
        tokenizer = self.start.tokenizer
        return make_loader(
            data, start, model=self.model, tokenizer=tokenizer, **self.loader_options
        )

    def _label_count(self) -> int:
        labels = self.loader_options.get("labels")
        if labels is None:
            from ai_jax.data import nano

            labels = nano.LABELS
        return len(labels)

    def _opening(self, step: int) -> str:
        params = self.start.params
        millions = sum(v.size for v in params.values()) / 1e6
        source = f"{len(self.start.loaded)} of {len(params)} tensors from {self.config.init}"
        origin = f"{source}, the others random" if self.start.loaded else "random weights"
        where = f"going on after step {step}" if step else origin
        device = f"{self.mesh.size} {jax.devices()[0].platform} device(s)"
        return f"{self.model.name}, {millions:.1f} M parameters: {where}; {device}"


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _use_cpu_devices(count: int | None) -> None:
    if count is None:
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as e:
        # JAX is running already (in a notebook, say): fine if it has as many devices.
        if jax.device_count() != count:
            raise UserError(
                f"cpu_devices is {count}, but JAX already runs with {jax.device_count()}; start a "
                "new process"
            ) from e


def _close(batches: Iterator[Batch]) -> None:
    close = getattr(batches, "close", None)
    if close is not None:
        close()
