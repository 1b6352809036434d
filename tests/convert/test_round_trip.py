"""from_hf and to_hf: each other's inverse, and every refusal names its tensor."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest

from ai_jax.config import to_dict
from ai_jax.convert import mapping
from ai_jax.convert.from_hf import from_hf
from ai_jax.convert.open import open_source
from ai_jax.convert.to_hf import to_hf
from ai_jax.errors import UserError


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("full", [False, True], ids=["thinker", "omni"])
def test_there_and_back_is_the_same_folder(tmp_path, source, dtype, full):
    src = source(dtype=dtype, full=full)
    # Infinities, NaN payloads and negative zero are bits like any others.
    weird = np.array([0x7F81, 0xFFC0, 0x8000, 0x0001], np.uint16).view(ml_dtypes.bfloat16)
    src.tensors[f"{src.prefix}visual.odd"] = weird
    folder = src.save()
    there = from_hf(folder, tmp_path / "checkpoint", allow_nan=True)
    back = to_hf(tmp_path / "checkpoint", tmp_path / "back")

    assert there.tensors == back.tensors == len(src.tensors)
    assert there.bytes == back.bytes == sum(t.nbytes for t in src.tensors.values())
    got = contents(tmp_path / "back")
    info = json.loads(got.pop("ai_jax.json"))
    assert got == contents(folder)
    assert info["audio"]["n_window"] == 20


def test_shards_come_back_as_they_were(tmp_path, source):
    src = source(full=True)
    names = list(src.tensors)
    # Layers straddle the shards.
    folder = src.save(shards=[names[::3], names[1::3], names[2::3]])
    from_hf(folder, tmp_path / "checkpoint")
    to_hf(tmp_path / "checkpoint", tmp_path / "back")
    ours = contents(tmp_path / "back")
    del ours["ai_jax.json"]
    assert ours == contents(folder)


def test_our_own_description_wins_and_is_kept(tmp_path, source, tiny):
    src = source()
    src.info = to_dict(tiny) | {"provenance": {"seed": 7}}
    folder = src.save()
    from_hf(folder, tmp_path / "checkpoint")
    to_hf(tmp_path / "checkpoint", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(folder)


def test_the_checkpoint_separates_the_model_from_what_travels_along(tmp_path, source):
    from orbax.checkpoint import v1 as ocp

    src = source(full=True)
    from_hf(src.save(), tmp_path / "checkpoint")
    params = ocp.load_checkpointables(tmp_path / "checkpoint", {"params": None})["params"]
    assert {f"thinker.{name}" for name in params} < src.tensors.keys()
    opened = open_source(tmp_path / "checkpoint")
    carried = {mapping.to_hf(name, "thinker.") for name in opened.carried}
    assert carried == src.tensors.keys() - {f"thinker.{name}" for name in params}


def test_the_arrays_are_described_as_orbax_does_it(tmp_path, source):
    from orbax.checkpoint import v1 as ocp

    from_hf(source(full=True).save(), tmp_path / "ours")
    context = ocp.Context()
    context.array.saving.array_metadata_store = None
    with context:
        parts = ocp.load_checkpointables(tmp_path / "ours", {"params": None, "carried": None})
        ocp.save_checkpointables(tmp_path / "theirs", parts)
    for part in parts:
        ours, theirs = (tmp_path / who / part / "_METADATA" for who in ("ours", "theirs"))
        assert ours.read_text() == theirs.read_text()


def refuse(folder, tmp_path, *parts):
    with pytest.raises(UserError) as e:
        from_hf(folder, tmp_path / "out")
    assert all(part in str(e.value) for part in parts), e.value
    assert "\n" not in str(e.value)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_an_unmapped_tensor_is_refused(tmp_path, source):
    src = source(full=True)
    src.tensors["thinker.model.layers.7.mlp.up_proj.weight"] = np.ones((96, 48), np.float32)
    refuse(src.save(), tmp_path, "'thinker.model.layers.7.mlp.up_proj.weight'", "no place")


def test_a_missing_tensor_is_refused(tmp_path, source):
    src = source(full=True)
    del src.tensors["thinker.audio_tower.ln_post.bias"]
    refuse(src.save(), tmp_path, "'thinker.audio_tower.ln_post.bias'", "missing")


def test_a_misshapen_tensor_is_refused(tmp_path, source):
    src = source()
    name = "model.layers.1.self_attn.o_proj.weight"
    src.tensors[name] = np.ones((48, 47), np.float32)
    refuse(src.save(), tmp_path, f"'{name}'", "[48, 47]", "[48, 48]")


def test_a_transposed_tensor_is_refused(tmp_path, source):
    src = source()
    name = "model.layers.0.mlp.down_proj.weight"
    src.tensors[name] = np.ascontiguousarray(src.tensors[name].T)
    refuse(src.save(), tmp_path, f"'{name}'", "[96, 48]")


@pytest.mark.parametrize("index", [False, True])
def test_a_tensor_in_two_shards_is_refused(tmp_path, source, index):
    src = source()
    names = list(src.tensors)
    folder = src.save(shards=[names[:40], names[39:]], index=index)
    refuse(folder, tmp_path, f"'{names[39]}'", "model-00001-of", "model-00002-of")


def test_a_quantised_tensor_is_refused(tmp_path, source):
    src = source()
    src.tensors["lm_head.weight"] = src.tensors["lm_head.weight"].astype(np.int8)
    refuse(src.save(), tmp_path, "'lm_head.weight'", "int8")


def test_folders_that_are_no_model_are_refused(tmp_path, source):
    refuse(tmp_path / "nowhere", tmp_path, "nowhere", "not a folder")
    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", tmp_path, "no config.json")
    src = source()
    folder = src.save()
    (folder / "model.safetensors").unlink()
    refuse(folder, tmp_path, "no *.safetensors")
    for text, part in [("{", "JSON"), ("{}", "model_type"), ('{"model_type": "llama"}', "llama")]:
        (folder / "config.json").write_text(text)
        refuse(folder, tmp_path, "config.json", part)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    for path, part in (("nowhere", "no folder"), ("other", "is not a model")):
        with pytest.raises(UserError, match=part):
            to_hf(tmp_path / path, tmp_path / "out")


def test_an_existing_target_is_kept_unless_told_otherwise(tmp_path, source):
    folder = source().save()
    from_hf(folder, tmp_path / "checkpoint")
    before = contents(tmp_path / "checkpoint" / "hf")
    with pytest.raises(UserError, match="exists"):
        from_hf(folder, tmp_path / "checkpoint")
    with pytest.raises(UserError, match="holds the model to convert"):
        from_hf(folder, folder, overwrite=True)
    (folder / "README.md").write_text("another card")
    from_hf(folder, tmp_path / "checkpoint", overwrite=True)
    after = contents(tmp_path / "checkpoint" / "hf")
    assert before["README.md"] == b"card" and after["README.md"] == b"another card"
    to_hf(tmp_path / "checkpoint", tmp_path / "back")
    with pytest.raises(UserError, match="exists"):
        to_hf(tmp_path / "checkpoint", tmp_path / "back")


@pytest.mark.parametrize("convert", [from_hf, to_hf])
def test_a_failure_half_way_leaves_nothing(tmp_path, source, convert, monkeypatch):
    src = source().save()
    if convert is to_hf:
        from_hf(src, tmp_path / "checkpoint")
        src = tmp_path / "checkpoint"
    before = {p.name for p in tmp_path.iterdir()}

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", fail)
        with pytest.raises(KeyboardInterrupt):
            convert(src, tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == before
    convert(src, tmp_path / "out")
