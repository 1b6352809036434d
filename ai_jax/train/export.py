"""The trained model as a Hugging Face folder, and the record of where its weights come from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ai_jax.convert.hf_folder import write_model_folder
from ai_jax.model import omni
from ai_jax.train.init import Start
from ai_jax.train.progress import describe
from ai_jax.train.stages import AUX, TrainConfig
from ai_jax.train.step import Params


def provenance(config: TrainConfig, start: Start) -> dict[str, Any]:
    """Where the weights of a run come from; goes into ``ai_jax.json``."""
    return {
        "trained_by": "ai-jax train",
        "model": config.model,
        "init": config.init,
        "base": None if start.base is None else str(start.base.resolve()),
        "tensors_from_init": len(start.loaded),
        "stages": {stage.name: stage.steps for stage in config.stages},
        "streams": config.steps * config.data.batch_size,
        "seed": config.seed,
    }


def export(
    config: TrainConfig, start: Start, params: Params, scores: Mapping[str, float], out: Path
) -> None:
    """Write the model (stacked ``params`` less ``aux.``) as safetensors, with its card.

    In the form and the dtypes of the model that the run started from, or else in bfloat16.
    """
    facts = provenance(config, start)
    weights = {k: v for k, v in params.items() if not k.startswith(AUX)}
    write_model_folder(
        start.model,
        omni.unstack_layers(weights),
        out,
        start.tokenizer_path,
        facts,
        base=start.base,
        dtype="bfloat16" if start.base is None else None,
        note=_note(start, facts, scores),
        overwrite=True,
    )


def _note(start: Start, facts: Mapping[str, Any], scores: Mapping[str, float]) -> str:
    origin = f"Started from {Path(facts['init']).name}" if facts["init"] else "Trained from scratch"
    stages = ", ".join(f"{name} ({steps} steps)" for name, steps in facts["stages"].items())
    text = f"{origin} by `ai-jax train` on {facts['streams']} composed streams. Stages: {stages}."
    return f"{text} At the end of training: {describe(scores)}." if scores else text
