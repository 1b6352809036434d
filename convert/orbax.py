"""Orbax checkpoints: which folders are some, what they hold, reading and writing them in pieces.

Layout: the checkpointable ``params`` (our flat names), ``carried`` (tensors that only travel along)
if there are any, ``ai_jax.json``, ``hf/`` with the files that lay beside the weights, and
``layout/`` with the headers and the index of the safetensors files that the tensors came from. A
training run is a folder of such checkpoints named by step; it may hold ``ai_jax.json`` and ``hf/``
once for all steps.
"""

from __future__ import annotations

import collections
import dataclasses
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ai_jax.convert import arrays, mapping, shards
from ai_jax.convert.files import INFO, check_links, read_info
from ai_jax.convert.source import Source
from ai_jax.errors import UserError

SIDE = "hf"
LAYOUT = "layout"
_TOKENIZER = "tokenizer.json"
_CONFIG = f"{SIDE}/config.json"
_MARKER = "_CHECKPOINT_METADATA"
_COMMITTED = "commit_success.txt"
_PARAMS, _CARRIED = "params", "carried"
_TREE = "_METADATA"  # Orbax's description of a part
_UNFINISHED = ".orbax-checkpoint-tmp"  # in the names of what Orbax has not finished
_STEP = re.compile(rf"\d+({re.escape(_UNFINISHED)}.*)?")
_AHEAD_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on disk; ``step`` if it is a training run's."""

    path: Path
    step: int | None = None

    def beside(self, name: str) -> Path | None:
        """The file or folder ``name`` of the checkpoint, or of its training run."""
        places = [self.path] if self.step is None else [self.path, self.path.parent]
        return next((p / name for p in places if (p / name).exists()), None)

    def info(self) -> Path:
        """Its ``ai_jax.json``; UserError if there is none."""
        path = self.beside(INFO)
        if path is None:
            raise UserError(f"{self.path} has no {INFO}; convert or copy it again")
        return path


def find(path: Path) -> Checkpoint | None:
    """The checkpoint at ``path``, or the latest one of the training run there, or None.

    Raises UserError for half a checkpoint; among the steps of a run, such are passed over.
    """
    if _UNFINISHED in path.name:
        raise _damaged(path, "its writing was never finished")
    if _is_checkpoint(path):
        step = int(path.name) if path.name.isdigit() else None
        return Checkpoint(path, step)
    steps = [p for p in path.iterdir() if p.name.isdigit() and _is_checkpoint(p)]
    last = max(steps, key=lambda p: int(p.name), default=None)
    if last is not None:
        return Checkpoint(last, int(last.name))
    for has, lacks in ((_MARKER, _PARAMS), (f"{_PARAMS}/{_TREE}", _MARKER)):
        if (path / has).exists():
            raise _damaged(path, f"it has {has} but no {lacks}")
    return None


def check_begun(run: Path) -> None:
    """UserError if ``run``, in which ``find`` finds nothing, is a training run all the same."""
    steps = sorted(p.name for p in run.iterdir() if p.is_dir() and _STEP.fullmatch(p.name))
    if steps and (run / INFO).exists():
        raise UserError(
            f"{run} is a training run without a whole checkpoint ({steps[0]} is half written); go "
            "on with the training, or give another run"
        )


def _is_checkpoint(path: Path) -> bool:
    return (path / _MARKER).is_file() and (path / _PARAMS).is_dir()


def open_orbax(checkpoint: Checkpoint) -> Source:
    """Open a checkpoint. Raises UserError if it is damaged or does not fit its ``ai_jax.json``."""
    path = checkpoint.path.resolve()
    config, provenance = read_info(checkpoint.info())
    marker = _json(checkpoint, _MARKER)
    conversion = marker.get("custom_metadata") or {}
    if not isinstance(conversion, dict):
        raise _damaged(checkpoint.path, f"custom_metadata in {_MARKER} is not a mapping")
    has_carried = _CARRIED in (marker.get("item_handlers") or ())
    params, read_params = _part(checkpoint, _PARAMS)
    carried, read_carried = _part(checkpoint, _CARRIED) if has_carried else ({}, iter)
    found = mapping.partition(config, {k: v.shape for k, v in params.items()}, checkpoint.path)

    def fetch(names: list[str]) -> Iterator[tuple[str, np.ndarray]]:
        mine = iter(read_params([n for n in names if n in params]))
        along = iter(read_carried([n for n in names if n in carried]))
        for name in names:
            yield next(mine if name in params else along)

    side = checkpoint.beside(SIDE)
    form = conversion.get("form")  # of a converted checkpoint, which has all that came along
    for name in ([SIDE] if form else []) + ([LAYOUT, _CONFIG] if form == "hf" else []):
        if not (path / name).exists():
            raise _damaged(checkpoint.path, f"its {name} is missing")
    if side is not None:
        check_links(side)
    files = {p.name: p for p in sorted(side.iterdir()) if p.is_file()} if side else {}
    prefix, layout = conversion.get("prefix", ""), _read_layout(checkpoint.path)
    if layout is not None and form == "hf":  # those of a release have the authors' names
        _check_layout(layout, {mapping.to_hf(n, prefix) for n in params | carried}, checkpoint.path)
    return Source(
        path=checkpoint.path,
        kind="orbax",
        config=config,
        specs=params | carried,
        params=tuple(found.params),
        fetch=fetch,
        prefix=prefix,
        tokenizer=files.get(_TOKENIZER),
        files=files,
        info=checkpoint.info(),
        layout=layout,
        step=checkpoint.step,
        provenance=provenance,
        conversion=conversion,
    )


def _json(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    try:
        content = json.loads((checkpoint.path / name).read_text(encoding="utf-8"))
    except (ValueError, OSError):
        content = None
    if not isinstance(content, dict):
        raise _damaged(checkpoint.path, f"{name} is not a readable JSON mapping")
    return content


def _part(checkpoint: Checkpoint, part: str) -> tuple[dict[str, shards.Spec], shards.Read]:
    """Shapes and dtypes of the arrays of a part, and how to read them.

    Orbax's own ``metadata`` answers a damaged checkpoint with pages of warnings and tracebacks.
    """
    tree = _json(checkpoint, f"{part}/{_TREE}")
    try:
        names = [entry["key_metadata"][0]["key"] for entry in tree["tree_metadata"].values()]
    except (AttributeError, KeyError, IndexError, TypeError) as e:
        raise _damaged(checkpoint.path, f"{part}/{_TREE} does not name its tensors") from e
    path = checkpoint.path.resolve()
    views = arrays.views(path / part, names)
    if views is not None:
        specs = {name: shards.Spec(view.shape, view.dtype) for name, view in views.items()}
        return specs, lambda wanted: ((name, views[name]) for name in wanted)
    specs = _specs(checkpoint, part, names)
    return specs, lambda wanted: _read(path, part, wanted, specs)


def _specs(checkpoint: Checkpoint, part: str, names: list[str]) -> dict[str, shards.Spec]:
    start = _opener(checkpoint.path / part)
    coming = {name: start(name) for name in names}
    specs = {}
    for name, array in coming.items():
        try:
            found = array.result()
        except ValueError as e:
            raise _damaged(checkpoint.path, f"its tensor '{name}' cannot be read") from e
        specs[name] = shards.Spec(tuple(found.shape), found.dtype.numpy_dtype)
    return specs


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(f"{path} is damaged: {reason}. Convert or copy it again")


def _read_layout(checkpoint: Path) -> shards.Layout | None:
    folder = checkpoint / LAYOUT
    if not folder.is_dir():
        return None
    index = folder / shards.INDEX
    headers = {p.name: p.read_bytes() for p in sorted(folder.glob("*.safetensors"))}
    layout = shards.Layout(headers, index.read_bytes() if index.exists() else None)
    try:
        layout.specs()
    except (UserError, KeyError, TypeError) as e:
        raise _damaged(checkpoint, f"a file in its folder {LAYOUT} is not whole") from e
    return layout


def _check_layout(layout: shards.Layout, names: set[str], checkpoint: Path) -> None:
    """Every tensor came from some file, whose header is there, or it could not go back."""
    if lost := sorted(names - layout.specs().keys()):
        raise _damaged(checkpoint, f"no header in its folder {LAYOUT} has the tensor '{lost[0]}'")


def write_layout(checkpoint: Path, layout: shards.Layout) -> None:
    """Keep the headers and the index of the files that the tensors came from."""
    folder = checkpoint / LAYOUT
    folder.mkdir()
    for file, header in layout.headers.items():
        (folder / file).write_bytes(header)
    if layout.index is not None:
        (folder / shards.INDEX).write_bytes(layout.index)


def _opener(folder: Path) -> Callable[[str], Any]:
    """Opens arrays of a part by name, with TensorStore: each call gives a future."""
    import tensorstore as ts

    folder = folder.resolve()
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    driver = "zarr3" if json.loads((folder / _TREE).read_text()).get("use_zarr3") else "zarr"
    kind = "ocdbt" if (folder / "manifest.ocdbt").is_file() else "file"
    at = {"driver": "ocdbt", "base": f"file://{folder}/"} if kind == "ocdbt" else {"driver": kind}

    def start(name: str) -> Any:
        key = f"{name}/" if kind == "ocdbt" else f"{folder / name}/"
        return ts.open({"driver": driver, "kvstore": at | {"path": key}}, context=context)

    return start


def _read(
    path: Path, part: str, names: list[str], of: Mapping[str, shards.Spec]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the named tensors in order, reading some 256 MiB (or one tensor) ahead.

    TensorStore reads them: twice as fast as ``load_checkpointables``, which waits for each call's
    last tensor before it gives the first.
    """
    start = _opener(path / part)
    coming: collections.deque[tuple[str, Any]] = collections.deque()
    waiting, ahead = collections.deque(names), 0
    while waiting or coming:
        try:
            while waiting and (not coming or ahead + of[waiting[0]].nbytes <= _AHEAD_BYTES):
                name = waiting.popleft()
                coming.append((name, start(name).result().read()))
                ahead += of[name].nbytes
            name, tensor = coming.popleft()
            ahead -= of[name].nbytes
            whole = tensor.result()
        except ValueError as e:
            raise _damaged(path, f"its tensor '{name}' cannot be read ({_reason(e)})") from e
        yield name, whole
        del tensor, whole


def load_sharded(
    path: Path, of: Mapping[str, shards.Spec], layout: Mapping[str, Any]
) -> dict[str, Any]:
    """The part ``params`` as ``jax.Array`` of these dtypes and shardings."""
    import jax
    from orbax.checkpoint import v1 as ocp

    want = {
        name: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=layout[name])
        for name, spec in of.items()
    }
    return ocp.load_checkpointables(path.resolve(), {"params": want})["params"]


def write(
    path: Path,
    parts: Mapping[str, Mapping[str, shards.Spec]],
    read: shards.Read,
    metadata: dict[str, Any],
    on_block: Callable[[str, np.ndarray], None],
) -> None:
    """Write a checkpoint block by block; what is in memory is a block, or a tensor to be cast.

    parts: checkpointable -> tensor -> shape and dtype. read: yields the named tensors in the order
    asked for; they are cast to the dtype of their spec. on_block: called with the name and every
    block of rows on its way to disk; may raise to stop. The same tensors give the same bytes.

    Orbax saves an array only when all of them are given at once, in their final dtype. So it makes
    the folder and its metadata from a scalar per part, and the arrays are then described like that
    and written in the format that it names there (Zarr 3 arrays in one OCDBT database per part),
    which stock Orbax reads.
    """
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.array.saving.array_metadata_store = None  # it would describe the scalars
    scalars = {part: {"scalar": np.zeros(())} for part in parts}
    try:
        with context:
            ocp.save_checkpointables(path, scalars, custom_metadata=metadata)
    except ValueError as e:  # TensorStore's errors, of which a full disk is the likeliest
        raise OSError(errno.EIO, _reason(e), str(path)) from e
    _forget_the_occasion(path)
    for part, specs in parts.items():
        for child in (path / part).iterdir():
            if child.is_dir():
                shutil.rmtree(child)
            elif child.name != _TREE:
                child.unlink()
        _describe(path / part / _TREE, specs)
        arrays.write(path / part, specs, read(list(specs)), on_block)


def _describe(path: Path, names: Iterable[str]) -> None:
    """Have Orbax's description of one array say the same of ``names``, in its order."""
    tree = json.loads(path.read_text(encoding="utf-8"))
    (entry,) = tree["tree_metadata"].values()
    (key,) = entry["key_metadata"]
    tree["tree_metadata"] = {
        str((name,)): entry | {"key_metadata": [key | {"key": name}]} for name in sorted(names)
    }
    path.write_text(json.dumps(tree), encoding="utf-8")


def _forget_the_occasion(path: Path) -> None:
    """Drop from Orbax's metadata when, and under which temporary name, the checkpoint was made."""
    marker = json.loads((path / _MARKER).read_text(encoding="utf-8"))
    times = dict.fromkeys(("init_timestamp_nsecs", "commit_timestamp_nsecs"))
    (path / _MARKER).write_text(json.dumps(marker | times), encoding="utf-8")
    if (path / _COMMITTED).exists():
        (path / _COMMITTED).write_text("Checkpoint commit was successful\n", encoding="utf-8")


def _reason(error: ValueError) -> str:
    """The system's words in an error of TensorStore."""
    for code in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EACCES, errno.EROFS):
        if os.strerror(code) in str(error):
            return os.strerror(code)
    return str(error).splitlines()[0]
