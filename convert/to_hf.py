"""Any model on disk -> Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from ai_jax.convert import hf, hf_folder, mapping
from ai_jax.convert.files import Summary
from ai_jax.convert.open import open_source
from ai_jax.convert.source import Source
from ai_jax.errors import UserError


def to_hf(
    src: str | Path,
    out: str | Path,
    *,
    base: str | Path | None = None,
    dtype: str | None = None,
    shard_bytes: int | None = None,
    overwrite: bool = False,
) -> Summary:
    """Convert the checkpoint or training run ``src`` to the Hugging Face folder ``out``.

    What ``from_hf`` made comes back as it was, to the byte, with ``ai_jax.json`` besides. What was
    trained from such a checkpoint (``base``; by default the one that the run recorded) takes over
    from it all that training did not touch, in its dtypes, and gets a card and names for its
    control tokens. Anything else becomes a folder of its own. ``transformers`` loads all of them.

    dtype: cast the tensors that the model runs. shard_bytes: largest shard; None keeps the shards
    of the source or base, unless tensors were cast or left behind: then they have up to 5 GB.
    Raises UserError if ``src`` is no model, ``base`` is gone or does not fit, or ``out`` exists and
    ``overwrite`` is off.
    """
    source = open_source(src)
    return hf_folder.write(
        source,
        out,
        base=_base(source, base),
        dtype=dtype,
        shard_bytes=shard_bytes,
        overwrite=overwrite,
    )


def _base(source: Source, given: str | Path | None) -> Source | None:
    """The folder or checkpoint whose form the result takes: ``source`` itself unless trained.

    A run that was trained from another run has that one's base. None where there is none, or it
    never was a Hugging Face folder; but a base that is ``given`` must be, or have been, one.
    """
    if source.step is None and given is None:
        return source if hf.CONFIG in source.files and source.kind != "release" else None
    place = given or source.provenance.get("base")
    if place is None:
        return None
    try:
        base = open_source(place)
    except UserError as e:
        if given is not None:
            raise
        raise UserError(
            f"{e} ({source.path} was trained from it; --base DIR gives another place)"
            if Path(place).is_dir()
            else f"{source.path} was trained from {place}, which is not there; give its place with "
            "--base DIR"
        ) from e
    if _shapes(base) != _shapes(source):
        raise UserError(f"{place} is a model of another size than {source.path}; give its base")
    form = base if hf.CONFIG in base.files else _base(base, None)
    if form is None and given is not None:
        raise UserError(
            f"{place} has no {hf.CONFIG} whose form could be taken; give a Hugging Face folder or "
            "what from-hf made of it, or leave --base out"
        )
    return form


def _shapes(source: Source) -> dict[str, mapping.Shape]:
    return {name: source.specs[name].shape for name in source.params}
