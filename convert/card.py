"""The README.md of a model folder: what the model is, how it listens, where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ai_jax.config import ModelConfig


def card(config: ModelConfig, provenance: Mapping[str, Any], *, note: str = "") -> str:
    """A model card in Markdown. provenance: as in ``ai_jax.json``; note: a paragraph of its own."""
    head = ["---", "library_name: ai-jax", "pipeline_tag: audio-text-to-text"]
    parts = [
        "\n".join([*head, "---"]),
        f"# {config.name}",
        "An Audio Interaction Model: it listens to a stream in chunks of "
        f"{1000 * config.chunk_seconds:g} ms, after each decides whether to speak, and goes on "
        "listening while it answers.",
        "```\nai-jax listen RECORDING --model .\n```",
        "## Stream format\n\n" + _format(config),
        "## Provenance\n\n" + _provenance(provenance),
    ]
    if note:
        parts.insert(3, note)
    return "\n\n".join(parts) + "\n"


def _format(config: ModelConfig) -> str:
    stream = config.stream.format
    rows = {
        "format": stream.name,
        "audio tokens of a chunk": config.audio.chunk_tokens,
        "silent": stream.silent,
        "response": stream.response,
        "end of a reply": stream.eos,
        "placeholder of an audio token": stream.audio,
        "padding": stream.pad,
        "threshold of P(response)": f"{config.stream.threshold:g}",
    }
    for name in ("prefix_open", "prefix_close", "chunk_open", "chunk_close", "emotions"):
        if ids := getattr(stream, name):
            rows[name.replace("_", ", ")] = " ".join(map(str, ids))
    return _table(rows)


def _provenance(provenance: Mapping[str, Any]) -> str:
    rows = {}
    for key, value in provenance.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{k} {v}" for k, v in value.items())
        if value not in (None, "", []):
            rows[key.replace("_", " ")] = value
    return _table(rows) if rows else "Not recorded."


def _table(rows: Mapping[str, Any]) -> str:
    return "| | |\n|---|---|\n" + "\n".join(f"| {k} | {v} |" for k, v in rows.items())
