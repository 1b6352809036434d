"""Choose the threshold of a trained nano model, measure it, and put it into the package.

    python scripts/nano_package.py out/nano material

The threshold is the one with the best balanced accuracy on the split "val". The figures of the
model card are those of the split "test" at that threshold.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path

from rich.console import Console

from ai_jax.convert.files import INFO, read_info, write_info
from ai_jax.convert.load import load
from ai_jax.evals import sounds
from ai_jax.evals.streams import trigger
from ai_jax.stream.engine import Engine

THRESHOLDS = tuple(i / 20 for i in range(1, 19))
STREAMS = 50

CARD = """---
license: apache-2.0
library_name: ai-jax
pipeline_tag: audio-text-to-text
---

# nano

The small Audio Interaction Model of ai-jax: it listens to a stream 400 ms at a time, decides
`<silent>` or `<response>`, and answers. It proves that every command works and shows what the
design does; it is no safety device.

* Shape: Qwen2.5-Omni's thinker (audio encoder and decoder) with {millions:.1f} M parameters in
  bfloat16: {layers} encoder layers of width {width}, {depth} decoder layers of width {hidden},
  {vocab} tokens.
* Stream format: {format}; threshold {threshold:g}, chosen on validation recordings.
* The audio tower was initialised from the encoder of Whisper tiny.en (OpenAI, MIT licence) and its
  upper half was fine-tuned; the decoder was trained from scratch.
* Training: {streams} composed streams of 24 s with `configs/train/nano.yaml`, on sounds
  synthesised by `ai_jax.data.sounds`, words and sentences spoken by synthetic voices (Kokoro,
  Piper, flite, espeak-ng) and real speakers, and real recordings under various open licences. None
  of that audio is in the package.
* The vision tower that `transformers` expects is an empty stub.

It answers twelve kinds of sound and writes down thirty words:

{sentences}

## Measured

Recordings and voices of the split "test", which neither training nor the choice of the threshold
saw; each clip is a stream of its own, in room tone. Command: `ai-jax eval MATERIAL`.

{figures}

Weak spots: single classes rest on few recordings; horns, coughs and knocks are confused with one
another; music and animals can raise false alarms; words are recognised one at a time, not in
running speech.
"""


def choose(engine: Engine, material: Path, console: Console) -> float:
    """The threshold, by the rule above.

    Until its first reply, a stream has the same probabilities whatever the threshold. So one pass
    that never replies tells which clips would be answered at each of them.
    """
    sounds_only = ("alert", "benign")
    silent = sounds.evaluate(engine, material, "val", threshold=1 - 1e-6, kinds=sounds_only)
    balanced = {}
    for threshold in THRESHOLDS:
        alerts = [h.p_max >= threshold for h in silent.heard if h.kind == "alert"]
        benign = [h.p_max < threshold for h in silent.heard if h.kind == "benign"]
        recall, quiet = sum(alerts) / len(alerts), sum(benign) / len(benign)
        balanced[threshold] = (recall + quiet) / 2
        console.print(
            f"val, threshold {threshold:.2f}: balanced {balanced[threshold]:.3f}, "
            f"recall {recall:.2f}, silent {quiet:.2f}"
        )
    return max(balanced, key=balanced.get)


def main() -> None:
    folder, material = Path(sys.argv[1]), Path(sys.argv[2])
    console = Console()
    model = load(folder)
    engine = Engine(model.config, model.params, model.tokenizer)
    threshold = choose(engine, material, console)
    console.print(f"threshold {threshold:g}")
    report = sounds.evaluate(engine, material, "test", threshold)
    console.print(sounds.table(report))
    chunks = trigger(model.config, model.params, model.tokenizer, material, "test", STREAMS)
    console.print(f"trigger accuracy per chunk {chunks['trigger_accuracy']:.3f}")

    stream = dataclasses.replace(model.config.stream, threshold=threshold)
    config = dataclasses.replace(model.config, stream=stream)
    write_info(folder / INFO, config, read_info(folder / INFO)[1])
    (folder / "README.md").write_text(_card(config, model, report, chunks), encoding="utf-8")
    package = Path(__file__).parent.parent / "ai_jax" / "assets" / "nano"
    for path in sorted(folder.iterdir()):
        shutil.copyfile(path, package / path.name)
    console.print(f"copied {folder} to {package}")


def _card(config, model, report: sounds.Report, chunks: dict[str, float]) -> str:
    from ai_jax.data import nano

    count = {kind: sum(h.kind == kind for h in report.heard) for kind in sounds.KINDS}
    rows = [
        ("balanced accuracy (respond or stay silent)", f"{report.balanced:.2f}", ""),
        ("alarming recordings answered", f"{report.recall:.2f}", count["alert"]),
        ("benign recordings left unanswered", f"{report.silent:.2f}", count["benign"]),
        ("alarming recordings answered rightly", f"{report.right:.2f}", count["alert"]),
        ("false alarms per minute", f"{report.false_alarms_per_minute:.2f}", count["benign"]),
        ("words right, unseen voices", f"{report.words:.2f}", count["word"]),
        ("running speech left unanswered", f"{report.speech:.2f}", count["speech"]),
        ("trigger accuracy per chunk", f"{chunks['trigger_accuracy']:.3f}", f"{STREAMS} streams"),
    ]
    figures = "| | | clips |\n|---|---|---|\n"
    figures += "\n".join(f"| {name} | {value} | {n} |" for name, value, n in rows)
    return CARD.format(
        millions=sum(p.size for p in model.params.values()) / 1e6,
        layers=config.audio.encoder_layers,
        width=config.audio.d_model,
        depth=config.text.num_hidden_layers,
        hidden=config.text.hidden_size,
        vocab=config.text.vocab_size,
        format=config.stream.format.name,
        threshold=config.stream.threshold,
        streams=f"{model.info['provenance']['streams']:,}",
        sentences="\n".join(f"* {label}: {text}" for label, text in nano.ALERTS.items())
        + "\n* words: " + ", ".join(nano.WORDS),
        figures=figures,
    )  # fmt: skip


if __name__ == "__main__":
    main()
