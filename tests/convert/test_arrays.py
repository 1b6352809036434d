"""Arrays that we wrote are used where they lie; all others are read by TensorStore, or refused."""

import json
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from orbax.checkpoint import v1 as ocp

from ai_jax.convert import arrays, ocdbt
from ai_jax.convert.from_hf import from_hf
from ai_jax.convert.open import open_source
from ai_jax.convert.shards import Spec
from ai_jax.convert.to_hf import to_hf

BLOCK = 64
TENSORS = {
    f"{shape} {np.dtype(dtype).name}": np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    for shape in [(), (0, 4), (4, 0), (7,), (33,), (7, 5), (100, 3, 2), (1, 200)]
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16, np.bool_, ml_dtypes.float8_e4m3fn)
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "_BLOCK_BYTES", BLOCK)
    specs = {name: Spec(t.shape, t.dtype) for name, t in TENSORS.items()}
    arrays.write(tmp_path / "arrays", specs, TENSORS.items(), lambda name, block: None)
    monkeypatch.undo()  # the size of blocks is for the writer to choose
    return tmp_path / "arrays"


def test_views_have_the_bits_and_are_no_copies(folder):
    views = arrays.views(folder, TENSORS)
    assert views.keys() == TENSORS.keys()
    for name, want in TENSORS.items():
        view = views[name]
        assert (view.dtype, view.shape) == (want.dtype, want.shape)
        assert view.tobytes() == want.tobytes()
        assert not view.flags.owndata and not view.flags.writeable


def rewrite(folder, change):
    """The same database but for what ``change`` makes of its values, in their order."""
    data, places = (folder / ocdbt.DATA).read_bytes(), ocdbt.places(folder)
    in_order = sorted(places.items(), key=lambda item: item[1])
    values = {key: data[at : at + size] for key, (at, size) in in_order}
    shutil.rmtree(folder)
    with ocdbt.Writer(folder) as database:
        for key, value in change(values).items():
            database.put(key, value)


ROWS = "(100, 3, 2) float32"


def describe(**fields):
    def change(values):
        content = json.loads(values[f"{ROWS}/zarr.json"]) | fields
        return values | {f"{ROWS}/zarr.json": json.dumps(content).encode()}

    return change


OTHERS = {
    "blocks in another order": lambda v: dict(reversed(v.items())),
    "a block of another size": lambda v: v | {f"{ROWS}/c/1/0/0": bytes(3)},
    "a block is missing": lambda v: {k: x for k, x in v.items() if k != f"{ROWS}/c/1/0/0"},
    "no description": lambda v: {k: x for k, x in v.items() if k != f"{ROWS}/zarr.json"},
    "a description that is no JSON": lambda v: v | {f"{ROWS}/zarr.json": b"{"},
    "a description that is no mapping": lambda v: v | {f"{ROWS}/zarr.json": b"[]"},
    "another shape": describe(shape=[100, 3, 1]),
    "a shape that is none": describe(shape=[-1, 3, 2]),
    "another dtype": describe(data_type="float16"),
    "an unknown dtype": describe(data_type="float7"),
    "compressed": describe(codecs=[{"name": "zstd", "configuration": {"level": 1}}]),
    "blocks of no rows": describe(
        chunk_grid={"name": "regular", "configuration": {"chunk_shape": [0, 3, 2]}}
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_we_would_have_written_otherwise_is_left_to_tensorstore(folder, other):
    rewrite(folder, OTHERS[other])
    assert arrays.views(folder, TENSORS) is None


@pytest.mark.parametrize("name", ["manifest.ocdbt", ocdbt.DATA])
def test_a_file_that_is_missing_or_cut_off(folder, name):
    path = folder / name
    path.write_bytes(path.read_bytes()[:-1])
    assert arrays.views(folder, TENSORS) is None
    path.unlink()
    assert arrays.views(folder, TENSORS) is None


def test_each_bit_of_where_values_lie_counts(folder):
    """Manifest and node, of which the latter is at the end of the file."""
    end = max(at + size for at, size in ocdbt.places(folder).values())
    rng = np.random.default_rng(0)
    for path, first in ((folder / "manifest.ocdbt", 0), (folder / ocdbt.DATA, end)):
        whole = path.read_bytes()
        for at in rng.choice(np.arange(first, len(whole)), min(200, len(whole) - first), False):
            flipped = bytearray(whole)
            flipped[at] ^= 1 << rng.integers(8)
            path.write_bytes(flipped)
            assert ocdbt.places(folder) is None, at
        path.write_bytes(whole)
    assert ocdbt.places(folder) is not None


def test_a_database_of_tensorstore_is_left_to_it(tmp_path):
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/"}).result()
    store["key"] = b"value" * 100
    assert (tmp_path / "manifest.ocdbt").exists()
    assert ocdbt.places(tmp_path) is None
    ocp.save_checkpointables(tmp_path / "checkpoint", {"params": {"a": np.ones((2, 3))}})
    assert arrays.views(tmp_path / "checkpoint" / "params", ["a"]) is None


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_both_ways_of_reading_give_the_same_folder(tmp_path, source, monkeypatch):
    from_hf(source(full=True).save(), tmp_path / "checkpoint")
    code = (
        "import sys\n"
        "from ai_jax.convert.to_hf import to_hf\n"
        f"to_hf({str(tmp_path / 'checkpoint')!r}, {str(tmp_path / 'in place')!r})\n"
        "assert not {'jax', 'orbax', 'tensorstore'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    monkeypatch.setattr(arrays, "views", lambda *args: None)
    to_hf(tmp_path / "checkpoint", tmp_path / "read")
    assert contents(tmp_path / "in place") == contents(tmp_path / "read")


def test_tensors_of_both_parts_come_in_the_order_asked_for(tmp_path, source):
    from_hf(source(full=True).save(), tmp_path / "checkpoint")
    opened = open_source(tmp_path / "checkpoint")
    names = sorted(opened.specs, key=lambda name: name[::-1])
    assert [name for name, _ in opened.fetch(names)] == names
