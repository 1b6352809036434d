import dataclasses
import importlib.resources
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from ai_jax.config import ModelConfig, preset, to_dict
from ai_jax.convert import mapping, shards
from ai_jax.convert.files import write_info
from ai_jax.convert.from_hf import from_hf
from ai_jax.convert.hf_folder import write_model_folder
from ai_jax.convert.load import load
from ai_jax.convert.to_hf import to_hf
from ai_jax.errors import UserError


@pytest.fixture
def tokenizer_json(tmp_path, byte_tokenizer):
    path = tmp_path / "tokenizer.json"
    byte_tokenizer._tokenizer.save(str(path))
    return path


@pytest.fixture
def params(tiny):
    rng = np.random.default_rng(1)
    shapes = mapping.expected(tiny)
    return {k: rng.standard_normal(v).astype(np.float32) for k, v in shapes.items()}


def save_run(run, config, params, tokenizer_json, steps=(2, 10)):
    """What training leaves: one checkpoint a step, description and tokenizer beside them."""
    for step in steps:
        state = {k: jnp.asarray(v) * step for k, v in params.items()}
        ocp.save_checkpointables(
            run / str(step), {"params": state, "optimizer": {"m": jnp.ones(3)}}
        )
    write_info(run / "ai_jax.json", config, {"run": "r"})
    (run / "hf").mkdir()
    tokenizer_json.rename(run / "hf" / "tokenizer.json")


def equal(loaded, params, dtype=np.float32):
    assert loaded.params.keys() == params.keys()
    for name, value in loaded.params.items():
        want = params[name].astype(dtype)
        assert value.dtype == want.dtype and np.array_equal(value, want), name


def test_a_folder_and_its_checkpoint_load_alike(tmp_path, source, tokenizer_json):
    src = source(full=True)
    folder = src.save()
    tokenizer_json.rename(folder / "tokenizer.json")
    from_hf(folder, tmp_path / "checkpoint")
    a, b = load(folder), load(str(tmp_path / "checkpoint"))
    want = {name: src.tensors[f"thinker.{name}"] for name in mapping.expected(a.config)}
    equal(a, want, want["lm_head.weight"].dtype)
    equal(b, want, want["lm_head.weight"].dtype)
    assert dataclasses.replace(a.config, name="") == dataclasses.replace(b.config, name="")
    assert (a.info["kind"], b.info["kind"]) == ("hf", "orbax")
    assert b.info["provenance"] == {"source": "source"}
    assert a.tokenizer.decode(a.tokenizer.encode("é!")) == "é!"
    for value in (*a.params.values(), *b.params.values()):
        assert value.ctypes.data % 64 == 0
    equal(load(folder, dtype="float32"), want)


def test_a_run_gives_its_latest_step(tmp_path, tiny, params, tokenizer_json):
    save_run(tmp_path / "run", tiny, params, tokenizer_json)
    (tmp_path / "run" / "11.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "run" / "12").mkdir()  # not a checkpoint yet
    latest = load(tmp_path / "run")
    equal(latest, {k: v * 10 for k, v in params.items()})
    assert latest.config == tiny
    assert latest.info["step"] == 10 and latest.info["provenance"] == {"run": "r"}
    earlier = load(tmp_path / "run" / "2")
    equal(earlier, {k: v * 2 for k, v in params.items()})
    assert earlier.info["step"] == 2


def test_a_run_becomes_a_folder_that_loads_the_same(tmp_path, tiny, params, tokenizer_json):
    save_run(tmp_path / "run", tiny, params, tokenizer_json)
    summary = to_hf(tmp_path / "run", tmp_path / "out")
    out = load(tmp_path / "out")
    equal(out, load(tmp_path / "run").params)
    assert out.config == tiny
    assert out.info["provenance"] == {"run": "r"}
    assert "| training step | 10 |" in (tmp_path / "out" / "README.md").read_text()
    assert summary.tensors == len(shards.open_folder(tmp_path / "out"))
    # And from there into a checkpoint and back.
    from_hf(tmp_path / "out", tmp_path / "checkpoint")
    to_hf(tmp_path / "checkpoint", tmp_path / "again")
    files = [{p.name: p.read_bytes() for p in (tmp_path / f).iterdir()} for f in ("out", "again")]
    assert files[0] == files[1]


def test_an_export_casts_and_loads(tmp_path, tiny, params, tokenizer_json):
    out = tmp_path / "out"
    state = {k: jnp.asarray(v) for k, v in params.items()}
    write_model_folder(tiny, state, out, tokenizer_json, {"seed": 1}, note="A note.")
    card = (out / "README.md").read_text()
    assert "\nA note.\n" in card and "| seed | 1 |" in card
    loaded = load(out)
    assert loaded.config == tiny
    equal(loaded, params, jnp.bfloat16)
    with pytest.raises(UserError, match="exists"):
        write_model_folder(tiny, state, out, tokenizer_json, {})
    state.pop("model.norm.weight")
    with pytest.raises(UserError, match=r"'model\.norm\.weight' is missing"):
        write_model_folder(tiny, state, out, tokenizer_json, {}, overwrite=True)
    equal(load(out), params, jnp.bfloat16)


def test_a_checkpoint_of_another_size_is_refused(tmp_path, tiny, params, tokenizer_json):
    params["lm_head.weight"] = params["lm_head.weight"][:-1]
    save_run(tmp_path / "run", tiny, params, tokenizer_json)
    for use in (load, lambda path: to_hf(path, tmp_path / "out")):
        with pytest.raises(UserError, match=r"'lm_head\.weight' has shape \[319, 48\]"):
            use(tmp_path / "run")


def test_what_is_no_model_is_refused(tmp_path, tiny, source):
    with pytest.raises(UserError, match="no folder"):
        load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="is not a model"):
        load(tmp_path / "empty")
    src = source()
    src.info = to_dict(tiny)
    folder = src.save()
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        load(folder)
    (folder / "tokenizer.json").write_text("nonsense")
    with pytest.raises(UserError, match="cannot read the tokenizer"):
        load(folder)


def test_the_packaged_model(tmp_path, monkeypatch):
    packaged = importlib.resources.files("ai_jax.assets.nano")
    if (packaged / "model.safetensors").is_file():
        start = time.monotonic()
        nano = load()
        assert time.monotonic() - start < 2
        shipped, described = nano.config, preset("model", "nano", ModelConfig)
        assert (shipped.audio, shipped.text) == (described.audio, described.text)
        assert {p.dtype for p in nano.params.values()} == {np.dtype(np.float32)}
    monkeypatch.setattr(importlib.resources, "files", lambda name: tmp_path)
    with pytest.raises(UserError, match="no built-in model"):
        load()


def test_loading_a_folder_needs_neither_jax_nor_orbax(tmp_path, tiny, params, tokenizer_json):
    write_model_folder(tiny, params, tmp_path / "out", tokenizer_json, {})
    code = (
        "import sys\n"
        "from ai_jax.convert import from_hf, hf_folder, load, to_hf\n"
        f"load.load({str(tmp_path / 'out')!r}, 'float32')\n"
        "assert not {'jax', 'orbax', 'torch', 'tensorflow'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
