"""Writing a model folder in Hugging Face format."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ai_jax.config import ModelConfig
from ai_jax.convert import hf, mapping, shards
from ai_jax.convert.card import card
from ai_jax.convert.files import INFO, Summary, progress, whole_folder, write_info, write_json
from ai_jax.convert.hf_tokenizer import name_controls
from ai_jax.convert.mapped import let_go
from ai_jax.convert.open import open_source
from ai_jax.convert.source import Source


def write_model_folder(
    config: ModelConfig,
    params: Mapping[str, Any],
    out: str | Path,
    tokenizer_path: str | Path | None,
    provenance: Mapping[str, Any],
    *,
    base: str | Path | None = None,
    dtype: str | None = "bfloat16",
    note: str = "",
    overwrite: bool = False,
) -> Summary:
    """Write a model in memory as a folder that we and ``transformers`` load.

    params: our name -> array (NumPy or jax, any float dtype), cast to ``dtype`` one by one; None
    takes the dtypes of ``base``. base: the model that this one was trained from, which gives all
    that training had no use for. note: a paragraph of the card.
    Raises UserError if a tensor is missing, superfluous or misshapen, or ``out`` exists and
    ``overwrite`` is off.
    """
    shapes = {name: tuple(p.shape) for name, p in params.items()}
    found = mapping.partition(config, shapes, where="the model to write")
    tokenizer = None if tokenizer_path is None else Path(tokenizer_path)
    source = Source(
        path=None,
        kind="memory",
        config=config,
        specs={name: shards.Spec(shapes[name], np.dtype(p.dtype)) for name, p in params.items()},
        params=tuple(found.params),
        fetch=lambda names: ((name, np.asarray(params[name])) for name in names),
        tokenizer=tokenizer,
        files={} if tokenizer is None else hf.tokenizer_files(tokenizer),
        provenance=provenance,
    )
    origin = None if base is None else open_source(base)
    return write(source, out, base=origin, dtype=dtype, note=note, overwrite=overwrite)


def write(
    source: Source,
    out: str | Path,
    *,
    base: Source | None = None,
    dtype: str | None = None,
    shard_bytes: int | None = None,
    note: str = "",
    overwrite: bool = False,
) -> Summary:
    """Write ``source`` in the form of ``base``, with what travels along there.

    base: ``source`` itself to give back the folder that it was converted from; None for a folder of
    its own. dtype, shard_bytes: see ``to_hf``. note: a paragraph of the card.
    """
    start = time.monotonic()
    plan = _plan(source, base, dtype)
    size = sum(spec.nbytes for spec in plan.specs.values())

    def read(hf_names: list[str]) -> Iterator[tuple[str, np.ndarray]]:
        for name, tensor in plan.fetch([mapping.to_ours(n, plan.prefix) for n in hf_names]):
            cast = shards.cast(name, tensor, plan.specs[name].dtype)
            let_go(tensor)
            yield mapping.to_hf(name, plan.prefix), cast
            del tensor, cast  # or they would be in memory beside the next one
            advance(plan.specs[name].nbytes)

    with (
        whole_folder(out, overwrite=overwrite, source=source.path, size=size) as folder,
        progress(f"Writing {Path(out).name}", size) as advance,
    ):
        folder.mkdir()
        shards.write_folder(
            folder,
            {mapping.to_hf(name, plan.prefix): spec for name, spec in plan.specs.items()},
            read,
            like=plan.layout if shard_bytes is None else None,
            shard_bytes=shard_bytes or shards.SHARD_BYTES,
        )
        _write_side_files(plan, folder, note)
    return Summary(len(plan.specs), size, time.monotonic() - start)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What goes into the folder. ``verbatim``: the files come from ``files`` as they are."""

    source: Source
    specs: dict[str, shards.Spec]
    fetch: shards.Read
    prefix: str
    config: dict[str, Any]
    files: Mapping[str, Path]
    layout: shards.Layout | None
    verbatim: bool


def _plan(source: Source, base: Source | None, dtype: str | None) -> _Plan:
    cast = {name: source.specs[name].dtype for name in source.params}
    if base is not None and base is not source:
        cast = {name: base.specs[name].dtype for name in source.params}
    if dtype is not None:
        cast = dict.fromkeys(cast, np.dtype(dtype))
    specs = {name: source.specs[name].cast(cast[name]) for name in source.params}
    if base is None:
        return _own(source, specs)

    specs |= {name: base.specs[name] for name in base.carried}
    if mapping.HEAD in base.carried:
        specs[mapping.HEAD] = specs[mapping.EMBEDDING]
    skipped = base.conversion.get("skipped", [])
    changed = bool(skipped) or dtype is not None or base.conversion.get("dtype") is not None
    config = hf.read_config(base.files[hf.CONFIG])
    files, prefix, zeros = dict(base.files), base.prefix, {}
    if "talker" in skipped and "thinker_config" in config:
        config, prefix = hf.thinker_alone(config), ""
        files.pop(hf.SPEAKERS, None)
    if "vision" in skipped:
        thinker = config.get("thinker_config", config)
        thinker["vision_config"] = hf.NO_VISION
        zeros = _no_vision(cast[mapping.EMBEDDING])
    if changed:
        hf.set_dtype(config, cast[mapping.EMBEDDING])
    return _Plan(
        source=source,
        specs=specs | zeros,
        fetch=_merged(source, base, zeros),
        prefix=prefix,
        config=config,
        files=files,
        layout=base.layout,
        verbatim=base is source and not changed,
    )


def _own(source: Source, specs: dict[str, shards.Spec]) -> _Plan:
    dtype = specs[mapping.EMBEDDING].dtype
    zeros = _no_vision(dtype)
    return _Plan(
        source=source,
        specs=specs | zeros,
        fetch=_merged(source, source, zeros),
        prefix="",
        config=hf.to_hf_config(source.config, dtype),
        files=source.files,
        layout=None,
        verbatim=False,
    )


def _no_vision(dtype: np.dtype) -> dict[str, shards.Spec]:
    return {name: shards.Spec(shape, dtype) for name, shape in hf.NO_VISION_SHAPES.items()}


def _merged(source: Source, base: Source, zeros: Mapping[str, shards.Spec]) -> shards.Read:
    """Reads the model's tensors from ``source``, what travels along from ``base``."""
    own = {name: name for name in source.params}
    own.setdefault(mapping.HEAD, mapping.EMBEDDING)  # a head that is tied

    def fetch(names: list[str]) -> Iterator[tuple[str, np.ndarray]]:
        mine = iter(source.fetch([own[name] for name in names if name in own]))
        along = iter(base.fetch([name for name in names if name not in own | zeros]))
        for name in names:
            if name in zeros:
                yield name, np.zeros(zeros[name].shape, zeros[name].dtype)
            else:
                yield name, next(mine if name in own else along)[1]

    return fetch


def _write_side_files(plan: _Plan, folder: Path, note: str) -> None:
    source = plan.source
    for name, path in plan.files.items():
        shutil.copyfile(path, folder / name)
    if plan.verbatim and source.info is not None:
        shutil.copyfile(source.info, folder / INFO)
        return
    facts = dict(source.provenance)
    for key in ("base", "init"):
        if facts.get(key):
            facts[key] = Path(facts[key]).name  # where it lies is nobody else's business
    write_info(folder / INFO, source.config, facts)
    if plan.verbatim:
        return
    write_json(folder / hf.CONFIG, plan.config)
    if not (folder / hf.PREPROCESSOR).exists():
        write_json(folder / hf.PREPROCESSOR, hf.preprocessor(source.config))
    name_controls(folder, source.config)
    if source.step is not None:
        facts["training step"] = source.step
    (folder / hf.CARD).write_text(card(source.config, facts, note=note), encoding="utf-8")
