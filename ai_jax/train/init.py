"""Where a run starts: the model's config, its tokenizer, and its first weights."""

from __future__ import annotations

import dataclasses
import importlib.resources
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ai_jax.config import ModelConfig, load, preset
from ai_jax.errors import UserError
from ai_jax.model import omni
from ai_jax.tokens import TextTokenizer
from ai_jax.train.stages import TrainConfig

Params = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Start:
    """What a run trains: config, tokenizer and its file, and float32 weights, unstacked.

    loaded: names of the weights that came from ``init``; the others are random. base: the model
    folder or checkpoint that ``init`` is, from which an export takes what training has no use for.
    """

    model: ModelConfig
    tokenizer: TextTokenizer
    tokenizer_path: Path
    params: Params
    loaded: tuple[str, ...]
    base: Path | None = None


def start(config: TrainConfig) -> Start:
    """Make the model that ``config`` describes.

    Raises UserError for an ``init`` that is not there, holds a tensor that the model lacks or of
    another shape, or for a tokenizer whose text ids collide with the model's control tokens.
    """
    model = model_config(config)
    init = find_init(config)
    path = _tokenizer_path(config, init)
    tokenizer = TextTokenizer.from_file(path)
    _check_tokenizer(tokenizer, model, path)
    params = omni.init_params(model, config.seed, jnp.float32)
    given = {} if init is None else _read(init)
    check_subset(given, {k: v.shape for k, v in params.items()}, str(init))
    params |= {k: jnp.asarray(np.asarray(v, np.float32)) for k, v in given.items()}
    base = init if init is not None and init.is_dir() else None
    return Start(model, tokenizer, path, params, tuple(sorted(given)), base)


def model_config(config: TrainConfig) -> ModelConfig:
    """The model of a run: a preset by name, or a YAML or JSON file by path."""
    if config.model.endswith((".yaml", ".yml", ".json")):
        return load(config.model, ModelConfig)
    return preset("model", config.model, ModelConfig)


def find_init(config: TrainConfig) -> Path | None:
    """The path that ``config.init`` means: as it is, or inside the material folder."""
    if config.init is None:
        return None
    places = [Path(config.init), Path(config.data.material or ".") / config.init]
    for path in places:
        if path.exists():
            return path
    raise UserError(
        f"init: there is no {config.init}, neither here nor in the material folder; give the "
        "path of a model folder, a checkpoint or a .safetensors file"
    )


def check_subset(
    given: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Raise UserError unless every given tensor is one of the model's, in its shape."""
    for name, value in given.items():
        if name not in shapes:
            raise UserError(f"{where}: the model has no tensor '{name}'; remove it from the file")
        if tuple(value.shape) != tuple(shapes[name]):
            raise UserError(
                f"{where}: the tensor '{name}' has shape {list(value.shape)}, but the model's has "
                f"{list(shapes[name])}; train a model of the same sizes"
            )


def _check_tokenizer(tokenizer: TextTokenizer, model: ModelConfig, path: Path) -> None:
    """Text must encode to rows of the embedding, and to none that controls the stream."""
    format = model.stream.format
    control = {format.silent, format.response, format.eos, format.audio, format.pad}
    odd = [i for i in control if i < model.text.vocab_size and tokenizer.token_bytes(i)]
    if odd or tokenizer.token_bytes(model.text.vocab_size):
        raise UserError(
            f"the tokenizer {path} is not that of the model '{model.name}'; set tokenizer"
        )


def _read(path: Path) -> Mapping[str, np.ndarray]:
    if path.is_file():
        from ai_jax.convert import shards

        return shards.open_file(path)
    from ai_jax.convert.load import load as load_model

    return load_model(path).params


def _tokenizer_path(config: TrainConfig, init: Path | None) -> Path:
    if config.tokenizer is not None:
        return Path(config.tokenizer)
    if init is not None and init.is_dir():
        for path in (init / "tokenizer.json", init / "hf" / "tokenizer.json"):
            if path.exists():
                return path
    return Path(str(importlib.resources.files("ai_jax.assets.nano"))) / "tokenizer.json"
