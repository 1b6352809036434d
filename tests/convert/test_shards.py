import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from ai_jax.convert import shards
from ai_jax.convert.shards import Spec
from ai_jax.errors import UserError

RNG = np.random.default_rng(0)
MIXED = {
    name: RNG.integers(0, 100, shape).astype(dtype)
    for name, shape, dtype in [
        ("b.half", (3, 5), np.float16),
        ("a.brain", (2, 3, 2), ml_dtypes.bfloat16),
        ("z.single", (7,), np.float32),
        ("a.single", (1, 1), np.float32),
        ("scalar", (), np.float32),
        ("empty", (0, 4), np.float32),
        ("ints", (3,), np.int64),
        ("bytes", (5,), np.uint8),
        ("flags", (3,), np.bool_),
        ("é", (1,), np.int8),
    ]
}


def specs(tensors):
    return {name: Spec(t.shape, t.dtype) for name, t in tensors.items()}


def reader(tensors):
    return lambda names: ((name, tensors[name]) for name in names)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_files_equal_the_library_byte_for_byte(tmp_path):
    save_file(MIXED, tmp_path / "theirs", {"format": "pt"})
    shards.write_file(tmp_path / "ours", specs(MIXED), reader(MIXED))
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_reading_gives_the_same_bits_without_a_copy(tmp_path):
    save_file(MIXED, tmp_path / "model.safetensors")
    back = shards.open_folder(tmp_path)
    assert back.keys() == MIXED.keys()
    assert all(same(back[name], MIXED[name]) for name in MIXED)
    assert not back["z.single"].flags.owndata and not back["z.single"].flags.writeable


def test_a_large_model_is_split_and_indexed(tmp_path):
    tensors = {f"t{i}": np.full((i + 1, 4), i, np.float32) for i in range(6)}
    shards.write_folder(tmp_path, specs(tensors), reader(tensors), shard_bytes=100)
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)]
    sizes = [sum(t.nbytes for t in shards.open_file(tmp_path / f).values()) for f in files]
    assert all(size <= 100 for size in sizes)
    index = json.loads((tmp_path / shards.INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    back = shards.open_folder(tmp_path)
    assert all(same(back[name], tensors[name]) for name in tensors)


def test_a_tensor_larger_than_a_shard_has_its_own():
    big = {name: Spec((n,), np.dtype(np.uint8)) for name, n in [("a", 5), ("b", 50), ("c", 5)]}
    assert shards.group_by_bytes(big, big, 10) == [["a"], ["b"], ["c"]]


def test_a_given_layout_is_reproduced(tmp_path, monkeypatch):
    tensors = {name: np.full(3, i, np.float32) for i, name in enumerate("abc")}
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir(), ours.mkdir()
    # In an order and with spaces, metadata and an index that we would not write.
    entry = {"dtype": "F32", "shape": [3]}
    header_file(
        theirs / "y.safetensors",
        {"c": entry | {"data_offsets": [0, 12]}, "a": entry | {"data_offsets": [12, 24]}},
        tensors["c"].tobytes() + tensors["a"].tobytes(),
    )
    header_file(
        theirs / "x.safetensors",
        {"b": entry | {"data_offsets": [0, 12]}, "__metadata__": {"by": "hand"}},
        tensors["b"].tobytes(),
    )
    weight_map = {"a": "y.safetensors", "b": "x.safetensors", "c": "y.safetensors"}
    (theirs / shards.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    monkeypatch.chdir(tmp_path)
    layout = shards.Layout.of(Path("theirs"))
    shards.write_folder(ours, specs(tensors), reader(tensors), like=layout)
    for path in theirs.iterdir():
        assert (ours / path.name).read_bytes() == path.read_bytes()

    other = specs(tensors) | {"a": Spec((3,), np.dtype(np.float16))}
    tensors["a"] = tensors["a"].astype(np.float16)
    (tmp_path / "cast").mkdir()
    shards.write_folder(tmp_path / "cast", other, reader(tensors), like=layout)
    assert [p.name for p in (tmp_path / "cast").iterdir()] == ["model.safetensors"]


def test_a_tensor_in_two_files_is_named(tmp_path):
    save_file({"a": np.ones(1), "twice": np.ones(1)}, tmp_path / "one.safetensors")
    save_file({"b": np.ones(1), "twice": np.ones(1)}, tmp_path / "two.safetensors")
    with pytest.raises(UserError, match=r"'twice' is in both one\.safetensors and two\.safe"):
        shards.open_folder(tmp_path)


def header_file(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


ENTRY = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (f'{{"x":{ENTRY},"x":{ENTRY}}}'.encode(), "'x' is there twice"),
        ({"x": {"dtype": "F4", "shape": [1], "data_offsets": [0, 4]}}, "'x' has the dtype F4"),
        ({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "'x' does not fit"),
        ({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}, "'x' does not fit"),
        ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, "'x' does not fit"),
        ({"x": {"dtype": "F32", "data_offsets": [0, 4]}}, "'x' is unreadable"),
        ({"x": 3}, "'x' is unreadable"),
        (b"not json", "not JSON"),
        (b"[]", "not a mapping"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_damage_is_one_sentence_that_names_the_tensor(tmp_path, header, message):
    path = tmp_path / "model.safetensors"
    header_file(path, header, bytes(4))
    with pytest.raises(UserError, match=message):
        shards.open_folder(tmp_path)


@pytest.mark.parametrize("size", [0, 4, 20, -1])
def test_a_truncated_file_is_refused(tmp_path, size):
    path = tmp_path / "model.safetensors"
    save_file({"x": np.ones(9)}, path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UserError, match="not a whole safetensors file"):
        shards.open_folder(tmp_path)


def test_the_index_must_tell_the_truth(tmp_path):
    def index(weight_map):
        (tmp_path / shards.INDEX).write_text(json.dumps({"weight_map": weight_map}))

    save_file({"a": np.ones(1)}, tmp_path / "one.safetensors")
    save_file({"stray": np.ones(1)}, tmp_path / "unlisted.safetensors")
    index({"a": "one.safetensors"})
    assert shards.open_folder(tmp_path).keys() == {"a"}
    index({"a": "one.safetensors", "b": "one.safetensors"})
    with pytest.raises(UserError, match=r"promises the tensor 'b' in one\.safetensors"):
        shards.open_folder(tmp_path)
    index({"stray": "unlisted.safetensors"})
    save_file({"stray": np.ones(1), "more": np.ones(1)}, tmp_path / "unlisted.safetensors")
    with pytest.raises(UserError, match=r"unlisted\.safetensors holds the tensor 'more', which"):
        shards.open_folder(tmp_path)
    index({"a": "one.safetensors", "b": "two.safetensors"})
    with pytest.raises(UserError, match=r"shard two\.safetensors.* tensor 'b', is missing"):
        shards.open_folder(tmp_path)
    save_file({"a": np.ones(1)}, tmp_path / "model.safetensors")
    index({"a": "one.safetensors"})
    with pytest.raises(UserError, match="'a' is in both"):
        shards.open_folder(tmp_path)
    for bad in ({"a": "../one.safetensors"}, {"a": 3}, [1]):
        index(bad)
        with pytest.raises(UserError, match="not a safetensors index"):
            shards.open_folder(tmp_path)
