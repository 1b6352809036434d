"""Configuration is data: frozen dataclasses filled strictly from YAML or JSON mappings.

``load(path, cls)`` reads a file, ``from_dict(cls, mapping)`` fills a dataclass and ``to_dict`` is
its inverse. Unknown keys, wrong types and impossible values raise :class:`UserError` that names
the file, the key and, for a misspelt key, the nearest valid name.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

import yaml

from ai_jax.audio.mel import MelConfig
from ai_jax.errors import UserError
from ai_jax.tokens import StreamFormat

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AudioConfig:
    """Audio encoder. Field names are Hugging Face's ``Qwen2_5OmniAudioEncoderConfig``.

    ``n_window`` is half the number of mel frames of a chunk: 20 is a 400 ms chunk (40 mel frames ->
    20 after the strided convolution -> 10 tokens), 100 is the stock offline model.
    """

    num_mel_bins: int = 128
    d_model: int
    encoder_layers: int
    encoder_attention_heads: int
    encoder_ffn_dim: int
    max_source_positions: int = 1500
    n_window: int = 20
    output_dim: int

    def __post_init__(self) -> None:
        _require(self.n_window % 2 == 0 < self.n_window, "n_window must be even", self.n_window)
        _require(
            self.d_model % self.encoder_attention_heads == 0,
            "d_model must be divisible by encoder_attention_heads",
            (self.d_model, self.encoder_attention_heads),
        )
        _require(self.d_model % 2 == 0, "d_model must be even", self.d_model)

    @property
    def chunk_frames(self) -> int:
        """Mel frames of one chunk."""
        return 2 * self.n_window

    @property
    def chunk_tokens(self) -> int:
        """Audio tokens that the decoder sees for one full chunk."""
        return self.n_window // 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Decoder. Field names are Hugging Face's ``Qwen2_5OmniTextConfig``, but for the last one.

    fp16_positions: round positions to float16 before RoPE, so that odd ones above 2,048 coincide
    with their neighbours. The authors' code does, and weights that it trained may expect it.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 32768
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    fp16_positions: bool = False

    def __post_init__(self) -> None:
        _require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_attention_heads must be a multiple of num_key_value_heads",
            (self.num_attention_heads, self.num_key_value_heads),
        )
        _require(self.head_dim % 2 == 0, "head_dim must be even", self.head_dim)
        _require(
            not self.fp16_positions or self.max_position_embeddings <= 65504,
            "with fp16_positions, max_position_embeddings must not exceed 65504",
            self.max_position_embeddings,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """How a session runs: the format of the stream and the limits of serving.

    instruction: system text put before the stream (may be empty).
    threshold: a chunk is answered when P(<response>) reaches it.
    max_reply_tokens: longest reply; a reply that reaches it is closed with ``<eos>``.
    max_len: length of the KV cache in tokens; beyond it the oldest chunks go (the window slides).
    """

    format: StreamFormat
    instruction: str = ""
    threshold: float = 0.5
    max_reply_tokens: int = 128
    max_len: int = 4096

    def __post_init__(self) -> None:
        _require(0.0 < self.threshold < 1.0, "threshold must lie between 0 and 1", self.threshold)
        _require(self.max_reply_tokens > 0, "max_reply_tokens must be >= 1", self.max_reply_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything that a model is besides its weights."""

    name: str
    audio: AudioConfig
    text: TextConfig
    mel: MelConfig
    stream: StreamConfig

    def __post_init__(self) -> None:
        _require(
            self.audio.output_dim == self.text.hidden_size,
            "audio.output_dim must equal text.hidden_size",
            (self.audio.output_dim, self.text.hidden_size),
        )
        _require(
            self.audio.num_mel_bins == self.mel.n_mels,
            "audio.num_mel_bins must equal mel.n_mels",
            (self.audio.num_mel_bins, self.mel.n_mels),
        )
        _require(
            self.mel.normalization == "clip" or self.audio.chunk_frames == self.mel.chunk_frames,
            "mel.chunk_frames must be twice audio.n_window",
            (self.mel.chunk_frames, self.audio.n_window),
        )

    @property
    def chunk_samples(self) -> int:
        """Samples of one chunk at ``mel.sample_rate`` (6,400 for 400 ms)."""
        return self.audio.chunk_frames * self.mel.hop_length

    @property
    def chunk_seconds(self) -> float:
        return self.chunk_samples / self.mel.sample_rate


def _require(ok: bool, rule: str, got: Any) -> None:
    if not ok:
        raise UserError(f"{rule} (got {got})")


def load(path: str | Path, cls: type[T], overrides: Iterable[str] = ()) -> T:
    """Read ``path`` (YAML or JSON) into the frozen dataclass ``cls``; errors name the file.

    overrides: ``key.of.a.mapping=value``, the value in YAML, replaces what the file says.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        reason = getattr(e, "strerror", None) or e
        raise UserError(f"cannot read the config {path}: {reason}") from e
    try:
        data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (yaml.YAMLError, json.JSONDecodeError) as e:
        reason = " ".join(str(e).split())
        raise UserError(f"{path} is not valid {path.suffix[1:].upper()}: {reason}") from e
    for override in overrides:
        _override(data, override)
    return from_dict(cls, data, where=str(path))


def _override(data: Any, override: str) -> None:
    """Set one ``key=value`` in nested mappings; a key that does not exist is found by from_dict."""
    key, equals, value = override.partition("=")
    *parents, last = key.split(".")
    for parent in parents:
        data = data.setdefault(parent, {}) if isinstance(data, dict) else None
    if not equals or not isinstance(data, dict):
        raise UserError(f"cannot set '{override}'; write key.of.a.mapping=value")
    try:
        data[last] = yaml.safe_load(value)
    except yaml.YAMLError as e:
        raise UserError(f"cannot set '{override}': the value is not valid YAML") from e


def preset(kind: str, name: str, cls: type[T]) -> T:
    """Load ``configs/<kind>/<name>.yaml``, e.g. ``preset("model", "tiny", ModelConfig)``."""
    import importlib.resources as resources

    folder = resources.files(f"ai_jax.configs.{kind}")
    with resources.as_file(folder / f"{name}.yaml") as path:
        if not path.exists():
            known = sorted(p.name[:-5] for p in folder.iterdir() if p.name.endswith(".yaml"))
            raise UserError(f"no {kind} preset named '{name}'{_nearest(name, known)}")
        return load(path, cls)


def from_dict(cls: type[T], data: Any, *, where: str = "config", key: str = "") -> T:
    """Fill ``cls`` from a mapping, strictly and recursively."""
    at = f"{where}: {key}" if key else where
    if not isinstance(data, dict):
        raise UserError(f"{at}: expected a mapping, got {type(data).__name__}")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    for name in data:
        if name not in fields:
            raise UserError(f"{at}: unknown key '{name}'{_nearest(str(name), fields)}")
    values = {}
    for name, field in fields.items():
        if name in data:
            inner = f"{key}.{name}" if key else name
            values[name] = _coerce(hints[name], data[name], where, inner)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise UserError(f"{at}: the key '{name}' is missing")
    try:
        return cls(**values)
    except UserError as e:
        raise UserError(f"{at}: {e}") from None


def to_dict(config: Any) -> dict[str, Any]:
    """The mapping that ``from_dict`` turns back into an equal dataclass (tuples become lists)."""

    def plain(v: Any) -> Any:
        if dataclasses.is_dataclass(v):
            return {f.name: plain(getattr(v, f.name)) for f in dataclasses.fields(v) if f.init}
        if isinstance(v, (list, tuple)):
            return [plain(x) for x in v]
        if isinstance(v, dict):
            return {k: plain(x) for k, x in v.items()}
        return v

    return plain(config)


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, [str(k) for k in known], n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(map(str, known))}"


def _coerce(kind: Any, value: Any, where: str, key: str) -> Any:
    """Check ``value`` against the annotation ``kind``; int -> float and list -> tuple convert."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return from_dict(kind, value, where=where, key=key)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        options = [a for a in args if a is not type(None)]
        if len(options) == 1:
            return _coerce(options[0], value, where, key)
    if origin is Literal:
        if value in args:
            return value
        raise UserError(f"{where}: {key}: '{value}' is not valid{_nearest(str(value), args)}")
    if origin is tuple and isinstance(value, (list, tuple)):
        if args[-1] is Ellipsis:
            return tuple(_coerce(args[0], v, where, f"{key}[{i}]") for i, v in enumerate(value))
        if len(args) == len(value):
            return tuple(
                _coerce(a, v, where, f"{key}[{i}]")
                for i, (a, v) in enumerate(zip(args, value, strict=True))
            )
        raise UserError(f"{where}: {key}: expected {len(args)} values, got {len(value)}")
    if origin is dict and isinstance(value, dict):
        return {
            _coerce(args[0], k, where, f"{key} (a key)"): _coerce(args[1], v, where, f"{key}.{k}")
            for k, v in value.items()
        }
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if kind is float and isinstance(value, str):
        # YAML 1.1 reads 1e-4 as text.
        try:
            return float(value)
        except ValueError:
            pass
    if kind in (int, str, bool) and type(value) is kind:
        return value
    name = getattr(kind, "__name__", str(kind)).replace("typing.", "")
    raise UserError(f"{where}: {key}: expected {name}, got {type(value).__name__} {value!r}")
