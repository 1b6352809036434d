"""The command line: parsing and printing only; every command is a function elsewhere."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional, arg

from ai_jax import cli_convert
from ai_jax.cli_types import File, Folder, InFolder, Probability
from ai_jax.errors import UserError

app = tyro.extras.SubcommandApp()
bench = tyro.extras.SubcommandApp()


@app.command(name="listen")
def listen(
    audio: Annotated[Positional[Path], arg(metavar="AUDIO", help_behavior_hint="")],
    model: Folder = None,
    threshold: Probability = None,
    realtime: bool = False,
    as_json: Annotated[bool, arg(name="json")] = False,
    plot: File = None,
) -> None:
    """Listen to a recording and print when the model speaks and what it says.

    Args:
        audio: Recording (WAV, FLAC, OGG or MP3; any rate, any number of channels).
        model: Folder of a model: Hugging Face format, converted checkpoint or training run.
            Without it, the small model of the package listens.
        threshold: Answer when P(response) reaches it, between 0 and 1.
            A lower one misses less and raises more false alarms. Without it, the model's own.
        realtime: Take the recording in at the speed of sound, as a microphone would.
        as_json: Print one JSON object per 400 ms chunk instead of the timeline.
        plot: Also draw waveform, P(response) and replies into this PNG file.
    """
    from ai_jax.audio import io
    from ai_jax.stream import show
    from ai_jax.stream.listen import listen as run

    if threshold is not None and not 0 < threshold < 1:
        raise UserError(f"--threshold must lie between 0 and 1 (got {threshold})")
    if plot is not None and plot.suffix.lower() != ".png":
        raise UserError(f"--plot draws a PNG file (got {plot}); end its name in .png")
    blocks = io.stream(audio, block_seconds=0.1 if realtime else 2.0)
    first = next(blocks)  # bad input is reported before the model is loaded
    _, engine = _load(model)
    blocks = itertools.chain([first], blocks)
    if realtime:
        blocks = show.pace(blocks)
    results = run(engine, blocks, threshold=threshold)
    kept = []
    timeline = show.Timeline(engine.config.chunk_seconds)
    for result in results:
        if plot is not None:
            kept.append(result)
        if as_json:
            print(json.dumps(show.record(result)), flush=True)
        else:
            timeline.add(result)
    if not as_json:
        timeline.close()
    if plot is not None:
        limit = engine.config.stream.threshold if threshold is None else threshold
        show.draw(kept, plot, threshold=limit, title=audio.name)
        print(f"drew {plot}", file=sys.stderr)


@app.command(name="demo")
def demo(
    out: Annotated[Path, arg(metavar="DIR")] = Path("out/demo"),
    seed: Annotated[int, arg(metavar="N")] = 0,
) -> None:
    """Compose half a minute of sound that the model never heard, and let it listen.

    Args:
        out: Folder for the recording, what was in it and heard (demo.json), and a picture.
        seed: Another seed composes another recording.
    """
    from ai_jax.demo import run

    run(_load(None)[1], out, seed)


@app.command(name="train")
def train(
    config: Annotated[Positional[Path], arg(metavar="CONFIG", help_behavior_hint="")],
    out: Folder = None,
    material: Folder = None,
    minutes: Annotated[float | None, arg(metavar="M", help_behavior_hint="")] = None,
    export: Folder = None,
    set_: Annotated[
        tuple[str, ...], arg(name="set", metavar="KEY=VALUE ...", help_behavior_hint="")
    ] = (),
) -> None:
    """Train a model as a YAML file says; an interrupted run goes on where it stopped.

    Args:
        config: Training configuration, e.g. configs/train/nano.yaml.
        out: Folder of the run: checkpoints and metrics.jsonl (default: runs/NAME-OF-CONFIG).
        material: Folder with the recordings to train on, in place of data.material.
        minutes: Stop after this time; calling again with the same --out goes on.
        export: When training is complete, also write the model in Hugging Face format here.
        set_: Override keys of the configuration, e.g. --set data.batch_size=4 seed=1.
    """
    from ai_jax.config import load
    from ai_jax.train import loop
    from ai_jax.train.stages import TrainConfig

    overrides = [*set_, *([f"data.material={material}"] if material else [])]
    settings = load(config, TrainConfig, overrides)
    run_dir = out or Path("runs") / config.stem
    loop.train(settings, run_dir, minutes=minutes, export=export)


@app.command(name="eval")
def evaluate(
    material: InFolder,
    model: Folder = None,
    split: Literal["val", "test"] = "test",
    thresholds: Annotated[tuple[float, ...], arg(metavar="P ...", help_behavior_hint="")] = (),
    streams: Annotated[int, arg(metavar="N")] = 50,
    out: File = None,
) -> None:
    """Measure how well a model listens, on recordings that it was not trained on.

    Args:
        material: Folder with recordings and manifest.jsonl, as scripts/nano_material.py makes it.
        model: Folder of a model; without it the small model of the package.
        split: Part of the material: val to choose a threshold, test to report.
        thresholds: Answer when P(response) reaches it; several are tried one after the other.
            Without any, the model's own.
        streams: Composed streams of 24 s for the trigger accuracy; 0 leaves it out.
        out: Also write the measurements, clip by clip, into this JSON file.
    """
    from rich.console import Console

    from ai_jax.evals import sounds
    from ai_jax.evals.streams import trigger

    loaded, engine = _load(model)
    console = Console()
    limits = thresholds or (engine.config.stream.threshold,)
    reports = [sounds.evaluate(engine, material, split, limit) for limit in limits]
    for report in reports:
        console.print(sounds.table(report))
    if streams:
        m = trigger(loaded.config, loaded.params, loaded.tokenizer, material, split, streams)
        console.print(
            f"{streams} composed streams: trigger accuracy per chunk {m['trigger_accuracy']:.3f}, "
            f"response precision {m['response_precision']:.2f}, recall {m['response_recall']:.2f}, "
            f"text accuracy {m['text_accuracy']:.2f}"
        )
    if out is not None:
        sounds.save(reports, out)


@bench.command(name="stream")
def bench_stream(model: Folder = None, chunks: Annotated[int, arg(metavar="N")] = 1500) -> None:
    """Time a long stream: cost per chunk, real-time factor, memory, compilations.

    Args:
        model: Folder of a model; without it, the small model of the package.
        chunks: Chunks of 400 ms to listen to, at least 200.
    """
    from ai_jax.stream.bench import run

    if chunks < 200:
        raise UserError(f"--chunks must be at least 200 (got {chunks})")
    print("\n".join(run(_load(model)[1], chunks).lines()))


@bench.command(name="convert")
def bench_convert(
    source: Annotated[Positional[Path | None], arg(metavar="DIR", help_behavior_hint="")] = None,
    out: Folder = None,
    rounds: Annotated[int, arg(metavar="N")] = 1,
    ours_only: bool = False,
    as_json: Annotated[bool, arg(name="json")] = False,
) -> None:
    """Time from-hf and to-hf beside a plain copy, default Orbax and save_pretrained.

    Each runs in a process of its own, until its result is safe on disk; ratios are to the copy.

    Args:
        source: Folder in Hugging Face format; without it, the small model of the package.
        out: Folder on whose disk to write, twice the size of DIR at most; it is removed again.
            Without it, the current folder.
        rounds: Repeat everything so often and give medians.
        ours_only: Leave out default Orbax and save_pretrained, which hold all weights in memory.
        as_json: Print one JSON object instead of a table.
    """
    from rich.console import Console

    from ai_jax.convert import bench as measure
    from ai_jax.convert.load import packaged

    if rounds < 1:
        raise UserError(f"--rounds must be at least 1 (got {rounds})")
    with Console(stderr=True).status("") as status:
        report = measure.bench(
            source or packaged(), out=out, rounds=rounds, ours_only=ours_only, say=status.update
        )
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        Console().print(measure.table(report))


app.command(bench, name="bench", help="Measure speed.")
app.command(
    cli_convert.app, name="convert", help="Move, compare and look into checkpoints of any form."
)


def _load(model: Path | None):
    from ai_jax.convert.load import load
    from ai_jax.stream.engine import Engine

    loaded = load(model)
    engine = Engine(loaded.config, loaded.params, loaded.tokenizer)
    engine.warm_up()
    return loaded, engine


def main() -> None:
    """Entry point of ``ai-jax``: a user's mistake is one sentence and exit code 2."""
    try:
        app.cli(
            prog="ai-jax",
            description="A model that listens without end and decides when to speak.",
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except UserError as e:
        print(f"ai-jax: error: {e}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)


if __name__ == "__main__":
    main()
