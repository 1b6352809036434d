"""Every bit pattern survives every path, and the same source gives the same files."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tiny_folder import DTYPES, Source

from ai_jax.config import to_dict
from ai_jax.convert import arrays, mapping, orbax, shards
from ai_jax.convert.from_hf import from_hf
from ai_jax.convert.from_release import from_release
from ai_jax.convert.hf_folder import write_model_folder
from ai_jax.convert.load import load
from ai_jax.convert.to_hf import to_hf
from ai_jax.convert.to_orbax import has_nan
from ai_jax.convert.to_release import to_release

# Signed zeros, subnormals, infinities, quiet and signalling NaNs at the ends of their ranges.
ODD_32 = [0, 1, 0x7FFFFF, 0x7F800000, 0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF]


def patterns(dtype):
    """All patterns of 16 bits; of 32 bits, the odd ones with both signs and random ones.

    In random order: else few tensors would hold all NaNs, and the fused ones none.
    """
    rng = np.random.default_rng(0)
    if DTYPES[dtype] is not np.float32:
        return rng.permutation(1 << 16).astype(np.uint16)
    odd = np.array(ODD_32, np.uint32)
    random = rng.integers(0, 1 << 32, 40_000, np.uint32)
    return rng.permutation(np.concatenate([odd, odd | np.uint32(1 << 31), random]))


@pytest.fixture(scope="module", params=DTYPES)
def made(request, tmp_path_factory, tiny, byte_tokenizer):
    """dtype, a full model's folder whose every part holds all patterns, and its checkpoint.

    The model's tensors hold them in turn, one of the vision tower holds them alone.
    """
    tmp = tmp_path_factory.mktemp(request.param)
    bits = patterns(request.param)
    # A tower in safetensors: releases are then written without torch.
    noted = {"release": {"tower": "tower.safetensors"}}
    src = Source(tmp / "source", tiny, dtype=request.param, full=True)
    src.info = to_dict(tiny) | {"provenance": noted}
    at = 0
    for name, tensor in src.tensors.items():
        if mapping.to_ours(name, src.prefix) in mapping.expected(tiny):
            taken = np.arange(at, at + tensor.size) % bits.size
            src.tensors[name] = bits[taken].view(tensor.dtype).reshape(tensor.shape)
            at += tensor.size
    assert at >= bits.size
    src.tensors["thinker.visual.all"] = bits.view(DTYPES[request.param])
    folder = src.save()
    byte_tokenizer._tokenizer.save(str(folder / "tokenizer.json"))
    from_hf(folder, tmp / "checkpoint", allow_nan=True)
    return request.param, folder, tmp / "checkpoint"


ONE_DTYPE = pytest.mark.parametrize("made", ["bfloat16"], indirect=True)


def assert_same_bits(got, want):
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert tensor.dtype == want[name].dtype and tensor.shape == want[name].shape, name
        assert np.asarray(tensor).tobytes() == want[name].tobytes(), name


def thinker(folder, config):
    """The tensors that the model runs, under our names."""
    tensors = shards.open_folder(folder)
    prefix = "thinker." if any(name.startswith("thinker.") for name in tensors) else ""
    return {name: tensors[prefix + name] for name in mapping.expected(config)}


def tree(folder):
    """Every file's bytes by its path."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("shard_bytes", [None, 50_000], ids=["shards kept", "new shards"])
def test_there_and_back(made, tmp_path, shard_bytes):
    _, folder, checkpoint = made
    to_hf(checkpoint, tmp_path / "back", shard_bytes=shard_bytes)
    assert_same_bits(shards.open_folder(tmp_path / "back"), shards.open_folder(folder))
    count = len(list((tmp_path / "back").glob("*.safetensors")))
    assert count == 1 if shard_bytes is None else count > 5
    from_hf(tmp_path / "back", tmp_path / "again", allow_nan=True)
    params = "params/d/values"
    assert (tmp_path / "again" / params).read_bytes() == (checkpoint / params).read_bytes()


def test_loading(made, tiny):
    _, folder, checkpoint = made
    for path in (folder, checkpoint):
        assert_same_bits(load(path).params, thinker(folder, tiny))


@pytest.mark.parametrize(
    ("lm", "qkv"),
    [("safetensors", "grouped"), pytest.param("pt", "concatenated", marks=pytest.mark.torch)],
)
def test_through_a_release(made, tmp_path, tiny, lm, qkv):
    if lm == "pt":
        pytest.importorskip("torch")
    _, folder, checkpoint = made
    to_release(checkpoint, tmp_path / "release", lm=lm, qkv=qkv)
    from_release(tmp_path / "release", tmp_path / "checkpoint", allow_nan=True)
    to_hf(tmp_path / "checkpoint", tmp_path / "back")
    assert_same_bits(thinker(tmp_path / "back", tiny), thinker(folder, tiny))


def test_export_from_memory(made, tmp_path, tiny):
    """As training exports: the model's tensors from memory, the others from its base."""
    _, folder, checkpoint = made
    params = dict(load(checkpoint).params)
    write_model_folder(tiny, params, tmp_path / "out", None, {}, base=checkpoint, dtype=None)
    assert_same_bits(shards.open_folder(tmp_path / "out"), shards.open_folder(folder))


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_nan_is_noticed_and_nothing_else_is(dtype):
    bits = patterns(dtype)
    values = bits.view(DTYPES[dtype])
    found = [has_nan(values[i : i + 1]) for i in range(bits.size)]
    with np.errstate(invalid="ignore"):  # signalling NaNs
        assert np.array_equal(found, np.isnan(values.astype(np.float64)))


def test_blocks_of_every_shape_and_dtype(tmp_path, monkeypatch):
    """Tensors that end within a block, are one, or have no values, read by us and by Orbax."""
    from orbax.checkpoint import v1 as ocp

    monkeypatch.setattr(arrays, "_BLOCK_BYTES", 64)
    rng = np.random.default_rng(0)
    dtypes = [*DTYPES.values(), np.bool_, np.int8, np.uint32, ml_dtypes.float8_e4m3fn]
    tensors = {
        f"{shape} {np.dtype(dtype).name}": rng.integers(0, 2, shape).astype(dtype)
        for shape in [(), (0, 4), (4, 0), (7,), (33,), (7, 5), (100, 3, 2), (1, 200)]
        for dtype in dtypes
    }
    specs = {name: shards.Spec(t.shape, t.dtype) for name, t in tensors.items()}

    def read(names):
        return ((name, tensors[name]) for name in names)

    orbax.write(tmp_path / "out", {"params": specs}, read, {}, lambda name, block: None)
    assert_same_bits(dict(orbax._read(tmp_path / "out", "params", list(specs), specs)), tensors)
    theirs = ocp.load_checkpointables(tmp_path / "out", {"params": None})["params"]
    assert_same_bits(theirs, tensors)


def convert_all(folder, out):
    from_hf(folder, out / "checkpoint", allow_nan=True, skip=["vision"])
    to_hf(out / "checkpoint", out / "back", shard_bytes=50_000)
    to_release(out / "checkpoint", out / "release")


def test_another_process_at_another_place_gives_the_same_files(tmp_path, tiny):
    """Nothing of the time, the process, the order in a folder, or the place is in the results."""
    (tmp_path / "a").mkdir()
    src = Source(tmp_path / "a" / "source", tiny, full=True)
    # Its tower is written without torch, as above.
    src.info = to_dict(tiny) | {"provenance": {"release": {"tower": "tower.safetensors"}}}
    names = list(src.tensors)
    folder = src.save(shards=[names[::2], names[1::2]])
    copy = tmp_path / "elsewhere" / "deeper" / "source"
    copy.mkdir(parents=True)
    for path in sorted(folder.iterdir(), reverse=True):
        shutil.copyfile(path, copy / path.name)
    convert_all(folder, tmp_path / "here")
    code = "import sys, pathlib, test_bits; test_bits.convert_all(*map(pathlib.Path, sys.argv[1:]))"
    command = [sys.executable, "-c", code, str(copy), str(tmp_path / "there")]
    # Sets in another order than here.
    settings = {"PYTHONPATH": str(Path(__file__).parent), "PYTHONHASHSEED": "1"}
    subprocess.run(command, check=True, env=os.environ | settings | {"JAX_PLATFORMS": "cpu"})
    first, second = tree(tmp_path / "here"), tree(tmp_path / "there")
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


@ONE_DTYPE
def test_of_its_source_a_checkpoint_notes_the_name_alone(made, tmp_path):
    _, folder, _ = made
    trees = []
    for name in ("one", "two"):
        copy = shutil.copytree(folder, tmp_path / name)
        (copy / "ai_jax.json").unlink()
        from_hf(copy, tmp_path / f"{name}-checkpoint", allow_nan=True)
        trees.append(tree(tmp_path / f"{name}-checkpoint"))
        info = json.loads(trees[-1].pop("ai_jax.json"))
        assert info.pop("name") == name and info.pop("provenance") == {"source": name}
        trees[-1]["info"] = info
    assert trees[0] == trees[1]


@pytest.mark.torch
@ONE_DTYPE
@pytest.mark.parametrize("lm", ["safetensors", "pt"])
def test_pickles_are_the_same_too(made, tmp_path, lm):
    pytest.importorskip("torch")
    _, folder, _ = made
    source = shutil.copytree(folder, tmp_path / "source")
    (source / "ai_jax.json").unlink()
    for name in "ab":
        to_release(source, tmp_path / name, lm=lm)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    assert any(path.endswith(".pth") for path in tree(tmp_path / "a"))
