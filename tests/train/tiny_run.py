"""A run of the tiny model on beeps, for tests.

As a script, ``tiny_run.py RUN_DIR [two_devices]``, it can be killed and have its own devices.
"""

import dataclasses
import sys
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from ai_jax.data.compose import Event, Plan
from ai_jax.data.loader import LoaderConfig
from ai_jax.train.stages import SpecAugmentConfig, StageConfig, TrainConfig

LABELS = ("beep", "hiss")


def planner(rng: np.random.Generator) -> Plan:
    """One answered beep over a hiss."""
    t = np.arange(8000) / 16000
    beep = np.sin(2 * np.pi * rng.uniform(300, 3000) * t).astype(np.float32) / 4
    hiss = 0.05 * rng.standard_normal(12000, np.float32)
    events = [
        Event(np.zeros(rng.integers(1, 8000), np.float32)),
        Event(beep, response="hi", label="beep"),
        Event(hiss, "background", label="hiss"),
    ]
    return Plan(events, [hiss], [hiss])


def write_tokenizer(path: Path) -> Path:
    """Byte-level without merges: ids 0..255, below the control tokens of the tiny model."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return path


def tiny_config(folder: Path, **changes) -> TrainConfig:
    """Two stages, eight steps; the tokenizer is written to ``folder``."""
    decoder = ("model.*", "lm_head.*", "audio_tower.proj.*")
    settings = {
        "model": "tiny",
        "tokenizer": str(write_tokenizer(folder / "tokenizer.json")),
        "data": LoaderConfig(batch_size=2, chunks=4, max_tokens=64),
        "stages": (
            StageConfig(name="decoder", steps=3, learning_rate=1e-3, trainable=decoder),
            StageConfig(name="all", steps=5, learning_rate=1e-3, audio_layer_decay=0.8),
        ),
        "event_loss_weight": 0.1,
        "spec_augment": SpecAugmentConfig(time_masks=1, mel_masks=1),
        "dtype": "float32",
        "remat": False,
        "log_every": 1,
        "checkpoint_every": 2,
        "eval_every": 4,
        "eval_batches": 1,
        "keep": 4,
    }
    return TrainConfig(**(settings | changes))


if __name__ == "__main__":
    from ai_jax.train.loop import train

    out = Path(sys.argv[1])
    config = tiny_config(out.parent)
    if sys.argv[2:] == ["two_devices"]:
        first = config.stages[:1]
        config = dataclasses.replace(config, stages=first, eval_every=0, cpu_devices=2)
    train(config, out, planner=planner, labels=LABELS)
