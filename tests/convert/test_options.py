"""The options of from-hf and to-hf, as they are typed."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
from refusal import ai_jax
from tiny_folder import DTYPES, OTHERS, VISION, Source

from ai_jax.convert import hf, hf_folder, mapping, shards
from ai_jax.convert.from_hf import from_hf
from ai_jax.convert.open import open_source

EMBEDDING, HEAD = mapping.EMBEDDING, mapping.HEAD


@pytest.fixture
def call(monkeypatch, capsys):
    """Run ``ai-jax convert ARGS`` in this process: (exit code, stdout, stderr)."""
    return lambda *args: ai_jax(monkeypatch, capsys, "convert", *args)


@pytest.fixture
def run(call):
    """Run ``ai-jax convert ARGS``, which must succeed in silence: what it prints, in one line."""

    def run(*args):
        code, out, err = call(*args)
        assert (code, err) == (0, "")
        return " ".join(out.split())

    return run


@pytest.fixture
def refused(call):
    """Run ``ai-jax convert ARGS``, which must be refused: the sentence that says why."""

    def refused(*args):
        code, out, err = call(*args)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("ai-jax: error: ")
        return err

    return refused


def spread(shape, dtype):
    """Numbers of all magnitudes that float16 holds, with many ties among them."""
    rng = np.random.default_rng(1)
    numbers = np.ldexp(rng.uniform(-1, 1, shape), rng.integers(-26, 15, shape)).astype(np.float32)
    ties = numbers.view(np.uint32).reshape(-1)
    ties[::3] &= 0xFFFF_8000  # half way between two bfloat16
    ties[::3] |= 0x0000_8000
    ties[1::3] &= 0xFFFF_F000  # half way between two float16, as long as these are normal
    ties[1::3] |= 0x0000_1000
    numbers.reshape(-1)[:2] = 0.0, -0.0
    return numbers.astype(DTYPES[dtype])


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny):
    """A full model in each dtype, in two shards, as transformers 4 described it."""
    tmp = tmp_path_factory.mktemp("published")
    made = {}
    for dtype in DTYPES:
        src = Source(tmp / dtype, tiny, dtype=dtype, full=True)
        for name in (EMBEDDING, "audio_tower.conv2.weight"):
            src.tensors[f"thinker.{name}"] = spread(src.tensors[f"thinker.{name}"].shape, dtype)
        thinker = src.config["thinker_config"]
        del thinker["dtype"]
        thinker["text_config"]["torch_dtype"] = dtype
        thinker["vision_config"] = {"depth": 32, "torch_dtype": dtype}
        src.config |= {
            "architectures": ["Qwen2_5OmniForConditionalGeneration"],
            "torch_dtype": dtype,
            "talker_config": {"torch_dtype": dtype},
            "token2wav_config": {"dit_config": {"torch_dtype": "float32"}},
            "transformers_version": "4.51.3",
        }
        names = list(src.tensors)
        made[dtype] = src.save(shards=[names[::2], names[1::2]])
        (made[dtype] / "spk_dict.pt").write_bytes(b"voices")
        (made[dtype] / "generation_config.json").write_text('{"max_new_tokens": 7}')
    return made


@pytest.fixture(scope="module")
def checkpoints(folders):
    for folder in folders.values():
        from_hf(folder, folder.with_suffix(".checkpoint"))
    return {dtype: folder.with_suffix(".checkpoint") for dtype, folder in folders.items()}


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def ours(folder):
    """Its tensors by our names."""
    opened = open_source(folder)
    return {name: np.array(tensor) for name, tensor in opened.fetch(list(opened.specs))}


def same(a, b):
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


# Parts left behind.

PARTS = {"vision": set(VISION), "talker": set(OTHERS)}


@pytest.mark.parametrize(
    ("flags", "skipped"),
    [
        (["--thinker-only"], ["talker"]),
        (["--skip", "vision"], ["vision"]),
        (["--skip", "vision,talker"], ["talker", "vision"]),
        (["--thinker-only", "--skip=vision,"], ["talker", "vision"]),
    ],
)
def test_parts_are_left_behind(run, tmp_path, folders, flags, skipped):
    published, out = folders["bfloat16"], tmp_path / "out"
    before = ours(published)
    left = set().union(*(PARTS[part] for part in skipped))
    said = run("from-hf", published, tmp_path / "checkpoint", *flags)
    assert f"{len(before) - len(left)} tensors" in said
    report = json.loads(run("inspect", tmp_path / "checkpoint", "--json"))
    assert report["conversion"]["skipped"] == skipped
    assert f"skipped {', '.join(skipped)}" in run("inspect", tmp_path / "checkpoint")

    run("to-hf", tmp_path / "checkpoint", out)
    after = ours(out)
    blank = hf.NO_VISION_SHAPES if "vision" in skipped else {}
    assert after.keys() == before.keys() - left | blank.keys()
    assert all(same(after[name], before[name]) for name in before.keys() - left)
    assert {name: after[name].shape for name in blank} == blank

    was, config = config_of(published), config_of(out)
    if "talker" in skipped:
        assert config["architectures"] == ["Qwen2_5OmniThinkerForConditionalGeneration"]
        assert not config.keys() & {"thinker_config", "talker_config", "token2wav_config"}
        assert config["torch_dtype"] == "bfloat16" and "dtype" not in config
        assert config["transformers_version"] == "4.51.3"
    else:
        assert {k for k in was if was[k] != config[k]} == {"thinker_config"}
    thinker, was = config.get("thinker_config", config), was["thinker_config"]
    assert thinker["text_config"] == was["text_config"]
    vision = hf.NO_VISION if "vision" in skipped else was["vision_config"]
    assert thinker["vision_config"] == vision
    assert (out / "spk_dict.pt").exists() != ("talker" in skipped)
    for name in ("LICENSE", "chat_template.jinja", "generation_config.json"):
        assert (out / name).read_bytes() == (published / name).read_bytes()
    card = (out / "README.md").read_text()
    assert "| silent | 318 |" in card and "| source | bfloat16 |" in card


@pytest.mark.parametrize("parts", ["audio", "vision,speech", "vision talker"])
def test_an_unknown_part_is_refused(refused, tmp_path, folders, parts):
    said = refused("from-hf", folders["bfloat16"], tmp_path / "out", "--skip", parts)
    assert f"no part '{parts.split(',')[-1]}'; choose of vision, talker" in said
    assert not (tmp_path / "out").exists()


# Casts.


def nearest(numbers, dtype):
    """To the nearest of all numbers of a 16-bit ``dtype``, of two the even one."""
    dtype = np.dtype(dtype)
    all_codes = np.arange(int(np.array(np.inf, dtype).view(np.uint16)), dtype=np.uint16)
    values = all_codes.view(dtype).astype(np.float64)
    size = np.abs(numbers.astype(np.float64))
    above = np.searchsorted(values, size).clip(1, len(values) - 1)
    up, down = values[above] - size, size - values[above - 1]
    codes = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, above - 1)
    return codes.astype(np.uint16) | np.signbit(numbers).astype(np.uint16) << 15


def assert_cast(before, after, config, dtype):
    runs = set(mapping.expected(config))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        got = after[name]
        if name not in runs or tensor.dtype == DTYPES[dtype]:
            assert same(got, tensor), name
        elif dtype == "float32":
            assert got.dtype == np.float32
            assert np.array_equal(got.astype(np.float64), tensor.astype(np.float64))
        else:
            assert got.dtype == DTYPES[dtype]
            assert np.array_equal(got.view(np.uint16), nearest(tensor, DTYPES[dtype])), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("origin", DTYPES)
@pytest.mark.parametrize("command", ["from-hf", "to-hf"])
def test_what_the_model_runs_is_cast(
    run, tmp_path, folders, checkpoints, tiny, command, origin, dtype
):
    before, out = ours(folders[origin]), tmp_path / "out"
    if command == "from-hf":
        checkpoint = tmp_path / "checkpoint"
        run("from-hf", folders[origin], checkpoint, "--dtype", dtype)
        assert_cast(before, ours(checkpoint), tiny, dtype)
        report = json.loads(run("inspect", checkpoint, "--json"))
        assert report["conversion"]["dtype"] == dtype
        assert f"conversion: dtype {dtype}" in run("inspect", checkpoint)
        run("to-hf", checkpoint, out)
    else:
        run("to-hf", checkpoints[origin], out, "--dtype", dtype)
    assert_cast(before, ours(out), tiny, dtype)

    config = config_of(out)
    thinker = config["thinker_config"]
    assert config["torch_dtype"] == thinker["text_config"]["torch_dtype"] == dtype
    # What is not cast is not said to be.
    assert thinker["vision_config"]["torch_dtype"] == config["talker_config"]["torch_dtype"]
    assert config["talker_config"]["torch_dtype"] == origin
    assert config["token2wav_config"]["dit_config"]["torch_dtype"] == "float32"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_that_float16_lacks_are_refused(run, refused, tmp_path, source, dtype):
    src = source(dtype=dtype)
    name = "model.layers.1.mlp.up_proj.weight"
    src.tensors[name][3, 4] = -70000
    src.tensors["model.norm.weight"][0] = np.inf  # float16 has this one
    folder = src.save()
    for command in ("from-hf", "to-hf"):
        said = refused(command, folder, tmp_path / "out", "--dtype", "float16")
        assert f"'{name}' holds numbers that float16 cannot" in said
        assert not (tmp_path / "out").exists()
    src.tensors[name][3, 4] = 65280
    run("from-hf", src.save(), tmp_path / "out", "--dtype", "float16")
    assert np.isinf(ours(tmp_path / "out")["model.norm.weight"][0])


def test_a_tied_head_remains_the_copy_of_its_embedding(run, tmp_path, tiny, source):
    tied = dataclasses.replace(tiny, text=dataclasses.replace(tiny.text, tie_word_embeddings=True))
    src = source(config=tied, dtype="float32")
    src.tensors[HEAD] = src.tensors[EMBEDDING]
    folder = src.save()
    run("from-hf", folder, tmp_path / "checkpoint", "--dtype", "bfloat16")
    run("to-hf", tmp_path / "checkpoint", tmp_path / "cast")
    run("to-hf", folder, tmp_path / "direct", "--dtype", "bfloat16")
    params = {name: -src.tensors[name] for name in mapping.expected(tied)}
    hf_folder.write_model_folder(tied, params, tmp_path / "trained", None, {}, base=folder)
    for name in ("cast", "direct", "trained"):
        tensors = ours(tmp_path / name)
        assert tensors[HEAD].dtype == ml_dtypes.bfloat16
        assert same(tensors[HEAD], tensors[EMBEDDING])
        assert same(tensors[HEAD], src.tensors[HEAD].astype(ml_dtypes.bfloat16)) != (
            name == "trained"
        )


# Shards.


@pytest.mark.parametrize(
    ("size", "limit"),
    [("10KB", 10_000), ("40 kib", 40_960), ("0.1MB", 100_000), ("1GiB", 1 << 30)],
)
def test_no_shard_is_larger_than_asked(run, tmp_path, folders, checkpoints, size, limit):
    out = tmp_path / "out"
    run("to-hf", checkpoints["bfloat16"], out, "--max-shard-size", size)
    before, after = shards.open_folder(folders["bfloat16"]), shards.open_folder(out)
    assert before.keys() == after.keys()
    assert all(same(after[name], before[name]) for name in before)
    files = {p.name: shards.open_file(p) for p in sorted(out.glob("*.safetensors"))}
    sizes = [sum(t.nbytes for t in tensors.values()) for tensors in files.values()]
    for held, tensors in zip(sizes, files.values(), strict=True):
        assert held <= limit or len(tensors) == 1
    if limit > sum(sizes):
        assert list(files) == ["model.safetensors"]
        assert not (out / "model.safetensors.index.json").exists()
        return
    count = len(files)
    assert list(files) == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    assert count <= 2 * sum(sizes) / limit + 1
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(sizes)}
    assert index["weight_map"] == {name: file for file in files for name in files[file]}
    # Other files say nothing about shards, and come back as they were.
    assert (out / "config.json").read_bytes() == (folders["bfloat16"] / "config.json").read_bytes()


@pytest.mark.parametrize(
    "size", ["", "5", "2TB", "0GB", "0.0001KB", "-1GB", "nan", "1e3KB", "large", "9" * 400 + "GB"]
)
def test_nonsense_sizes_are_refused(refused, tmp_path, checkpoints, size):
    said = refused("to-hf", checkpoints["bfloat16"], tmp_path / "out", f"--max-shard-size={size}")
    assert f"'{size}' is not a size; give one like 2GB or 500MB" in said
    assert not (tmp_path / "out").exists()


# The base.


def test_a_base_gives_what_training_had_no_use_for(run, tmp_path, tiny, folders, checkpoints):
    rng = np.random.default_rng(5)
    shapes = mapping.expected(tiny)
    params = {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}
    alone = tmp_path / "alone"
    facts = {"steps": {"decoder": 30}}
    hf_folder.write_model_folder(tiny, params, alone, None, facts, dtype="float32")
    published = folders["bfloat16"]
    for base in (published, checkpoints["bfloat16"]):
        run("to-hf", alone, tmp_path / "out", "--base", base, "--overwrite")
        before, after = ours(published), ours(tmp_path / "out")
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            new = params[name].astype(tensor.dtype) if name in params else tensor
            assert same(after[name], new), name
        assert config_of(tmp_path / "out") == config_of(published)
        for name in ("LICENSE", "spk_dict.pt", "generation_config.json"):
            assert (tmp_path / "out" / name).read_bytes() == (published / name).read_bytes()
        card = (tmp_path / "out" / "README.md").read_text()
        assert "| silent | 300 |" in card and "| steps | decoder 30 |" in card


def test_a_base_that_does_not_fit_is_refused(refused, tmp_path, tiny, source, checkpoints):
    text = dataclasses.replace(tiny.text, intermediate_size=64)
    wide = source("wide", dataclasses.replace(tiny, text=text)).save()
    (tmp_path / "empty").mkdir()
    for base, says in (
        (wide, f"{wide} is a model of another size"),
        (tmp_path / "nowhere", "nowhere; give a model folder"),
        (tmp_path / "empty", "empty is not a model"),
    ):
        said = refused("to-hf", checkpoints["bfloat16"], tmp_path / "out", "--base", base)
        assert says in said
        assert not (tmp_path / "out").exists()
