"""The command line of ``ai-jax convert``: parsing and printing only."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import arg

from ai_jax.cli_types import Dtype, File, Folder, InFolder, OutFolder, Parts
from ai_jax.errors import UserError

app = tyro.extras.SubcommandApp()


@app.command(name="from-hf")
def from_hf(
    source: InFolder,
    out: OutFolder,
    thinker_only: bool = False,
    skip: Parts = "",
    dtype: Dtype = None,
    allow_nan: bool = False,
    overwrite: bool = False,
) -> None:
    """Convert a Hugging Face folder to a checkpoint that training and listening load.

    Everything in the folder is carried along, so that to-hf gives it back to the byte.

    Args:
        source: Folder with config.json, *.safetensors and tokenizer.json.
        out: Checkpoint to write.
        thinker_only: Leave talker and vocoder behind, as --skip talker.
        skip: Parts to leave behind, of vision and talker (with its vocoder), e.g. vision,talker.
        dtype: Cast the tensors that the model runs; without it, every tensor keeps its bits.
        allow_nan: Convert although a tensor holds NaN.
        overwrite: Replace OUT if it exists.
    """
    from ai_jax.convert.from_hf import from_hf as run
    from ai_jax.convert.mapping import PARTS

    parts = {part for part in skip.split(",") if part} | ({"talker"} if thinker_only else set())
    if unknown := sorted(parts - PARTS.keys()):
        raise UserError(f"--skip: there is no part '{unknown[0]}'; choose of {', '.join(PARTS)}")
    summary = run(source, out, dtype=dtype, skip=parts, allow_nan=allow_nan, overwrite=overwrite)
    _print_summary(summary, out)


@app.command(name="to-hf")
def to_hf(
    source: InFolder,
    out: OutFolder,
    base: Folder = None,
    dtype: Dtype = None,
    max_shard_size: Annotated[str | None, arg(metavar="SIZE", help_behavior_hint="")] = None,
    overwrite: bool = False,
) -> None:
    """Convert a checkpoint or a training run to a folder that transformers loads.

    What from-hf converted comes back to the byte, and so does all that training did not touch.

    Args:
        source: Converted checkpoint or folder of a training run.
        out: Folder to write.
        base: What the run started from; by default the place that it recorded.
        dtype: Cast the tensors that the model runs; without it, they have the source's dtypes.
            Those of a training run have the dtypes that it started from.
        max_shard_size: Largest shard, e.g. 2GB or 500MB; without it, the source's shards.
            If tensors were cast or left behind, that is 5GB.
        overwrite: Replace OUT if it exists.
    """
    from ai_jax.convert.files import parse_size
    from ai_jax.convert.to_hf import to_hf as run

    size = None if max_shard_size is None else parse_size(max_shard_size)
    summary = run(source, out, base=base, dtype=dtype, shard_bytes=size, overwrite=overwrite)
    _print_summary(summary, out)


@app.command(name="from-release")
def from_release(
    source: InFolder,
    out: OutFolder,
    fp16_positions: bool = False,
    dtype: Dtype = None,
    allow_nan: bool = False,
    overwrite: bool = False,
) -> None:
    """Convert the authors' published checkpoint to one that training and listening load.

    Args:
        source: Folder with decoder (safetensors or .pt), audio tower (.pth), configs, tokenizer.
            Reading .pt and .pth files needs PyTorch; no code in them is run.
        out: Checkpoint to write.
        fp16_positions: Round RoPE positions to float16, as the authors' code does.
            Odd positions above 2048 then coincide with even ones; their weights may expect it.
        dtype: Cast the tensors that the model runs; without it, every tensor keeps its bits.
        allow_nan: Convert although a tensor holds NaN.
        overwrite: Replace OUT if it exists.
    """
    from ai_jax.convert.from_release import from_release as run

    summary = run(
        source,
        out,
        fp16_positions=fp16_positions,
        dtype=dtype,
        allow_nan=allow_nan,
        overwrite=overwrite,
    )
    _print_summary(summary, out)


@app.command(name="to-release")
def to_release(
    source: InFolder,
    out: OutFolder,
    qkv: Annotated[Literal["concatenated", "grouped"] | None, arg(help_behavior_hint="")] = None,
    lm: Annotated[Literal["safetensors", "pt"] | None, arg(help_behavior_hint="")] = None,
    overwrite: bool = False,
) -> None:
    """Convert any model to a folder that the authors' code loads; needs PyTorch.

    Vision tower, talker and vocoder have no place there and stay behind.

    Args:
        source: Checkpoint, training run or Hugging Face folder.
        out: Folder to write.
        qkv: Order of queries, keys and values; grouped is that of older files.
            Without it, as the checkpoint came, or concatenated.
        lm: Form of the decoder; pt is what the authors' training starts from.
            Without it, as the checkpoint came, or safetensors.
        overwrite: Replace OUT if it exists.
    """
    from ai_jax.convert.to_release import to_release as run

    _print_summary(run(source, out, qkv=qkv, lm=lm, overwrite=overwrite), out)


@app.command(name="verify")
def verify(
    a: Annotated[tyro.conf.Positional[Path], arg(metavar="A", help_behavior_hint="")],
    b: Annotated[tyro.conf.Positional[Path], arg(metavar="B", help_behavior_hint="")],
    weights_only: bool = False,
    implementation: Literal["auto", "ours", "transformers"] = "auto",
    audio: File = None,
    chunks: Annotated[int, arg(metavar="N")] = 50,
    tolerance: Annotated[float | None, arg(metavar="X", help_behavior_hint="")] = None,
    as_json: Annotated[bool, arg(name="json")] = False,
) -> None:
    """Compare two models tensor by tensor, then run both on the same sound.

    Exit code: 0 if they are the same, 1 if they differ, 2 if one cannot be read.

    Args:
        a: Hugging Face folder, checkpoint, training run, or the authors' release.
        b: Another one.
        weights_only: Compare tensors and configs, run nothing.
        implementation: Who runs Hugging Face folders.
            auto: transformers, if installed, runs the first one, to have an independent opinion.
        audio: Recording to run on, besides noise; without it, spoken words of the package.
        chunks: Chunks of 400 ms to decode greedily.
        tolerance: Accept tensors and logits that differ by so much of their largest value.
            0.05 suits a conversion to bfloat16.
        as_json: Print one JSON object instead of tables.
    """
    from rich.console import Console

    from ai_jax.convert import verify as verifier

    if chunks < 1:
        raise UserError(f"--chunks must be at least 1 (got {chunks})")
    report = verifier.verify(
        a,
        b,
        run=not weights_only,
        implementation=implementation,
        audio=audio,
        chunks=chunks,
        tolerance=tolerance,
    )
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        Console().print(verifier.table(report))
    sys.exit(report.exit_code)


@app.command(name="inspect")
def inspect(
    path: InFolder,
    fingerprint: bool = False,
    as_json: Annotated[bool, arg(name="json")] = False,
) -> None:
    """Show what is in a checkpoint: form, size, dtypes, groups, stream format, training step.

    Args:
        path: Hugging Face folder, checkpoint, training run, or the authors' release.
        fingerprint: Also hash all weights, which reads them all.
            The same model has the same fingerprint in every form.
        as_json: Print one JSON object instead of tables.
    """
    from rich.console import Console

    from ai_jax.convert import inspect as inspector

    report = inspector.inspect(path, fingerprint=fingerprint)
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        Console().print(inspector.table(report))


def _print_summary(summary, out: Path) -> None:
    size = summary.bytes / 1e6
    print(
        f"{out}: {summary.tensors} tensors, {size:,.1f} MB in {summary.seconds:.1f} s"
        f" ({size / max(summary.seconds, 1e-9):,.0f} MB/s)"
    )
