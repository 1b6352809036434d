"""Writing folders of the authors."""

import json
import sys

import pytest
import yaml
from release_double import TOWER, Release

from ai_jax.config import to_dict
from ai_jax.convert.from_release import from_release
from ai_jax.convert.open import open_source
from ai_jax.convert.to_release import to_release
from ai_jax.errors import UserError


@pytest.fixture
def release(tmp_path, tiny):
    def make(name="release", **kwargs) -> Release:
        return Release(tmp_path / name, tiny, **kwargs)

    return make


def save(theirs):
    """With the tower in safetensors, for which torch is not needed."""
    return theirs.save(tower="safetensors")


def test_written_without_torch_where_the_source_had_none(tmp_path, release, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    theirs = release(grouped=True)
    folder = save(theirs)
    made = to_release(folder, tmp_path / "back")
    assert made.tensors == len(theirs.decoder) + len(theirs.tower)
    for path in folder.rglob("*"):
        if path.is_file():
            assert (tmp_path / "back" / path.relative_to(folder)).read_bytes() == path.read_bytes()


def test_a_model_of_ours_gets_all_that_the_authors_code_reads(tmp_path, source, tiny):
    src = source()
    made = to_release_without_torch(src.save(), tmp_path)
    config = yaml.safe_load((made / "model_config.yaml").read_text())
    text = tiny.text
    assert (config["n_layer"], config["n_embd"]) == (text.num_hidden_layers, text.hidden_size)
    assert config["block_size"] == open_source(src.folder).config.stream.max_len
    assert config["attn_bias"] and not config["bias"] and not config["parallel_residual"]
    index = json.loads((made / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {"model.safetensors"}
    omni = json.loads((made / "qwen25OmniConfig" / "config.json").read_text())
    assert omni["model_type"] == "qwen2_5_omni"
    assert omni["thinker_config"] == src.config
    assert (made / "LICENSE").read_text() == "terms"
    assert not (made / "config.json").exists()


def to_release_without_torch(folder, tmp_path):
    """The tower's form is what ``ai_jax.json`` notes."""
    noted = {"release": {"tower": f"{TOWER}.safetensors"}}
    config = open_source(folder).config
    (folder / "ai_jax.json").write_text(json.dumps(to_dict(config) | {"provenance": noted}))
    to_release(folder, tmp_path / "made")
    return tmp_path / "made"


@pytest.mark.parametrize("file", ["../x.pth", "/tmp/x.pth", ".."])
def test_a_noted_file_must_stay_in_the_folder(tmp_path, source, tiny, file):
    src = source()
    src.info = to_dict(tiny) | {"provenance": {"release": {"tower": file}}}
    with pytest.raises(UserError, match=r"ai_jax\.json names the file"):
        to_release(src.save(), tmp_path / "out")


def test_query_key_and_value_must_agree_to_be_one(tmp_path, source):
    src = source()
    name = "model.layers.1.self_attn.k_proj.weight"
    src.tensors[name] = src.tensors[name].astype("float32")
    with pytest.raises(UserError, match=r"layers\.1\.self_attn\.q_proj\.weight' is bfloat16"):
        to_release(src.save(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_configs_at_the_top_come_back(tmp_path, release):
    """Qwen2.5-Omni's, or that of the language model that litgpt leaves there."""
    for name in ("omni", "lm"):
        theirs = release(name)
        if name == "omni":
            theirs.omni_in = "."
        else:
            theirs.beside["config.json"] = '{"model_type": "qwen2"}'
        from_release(save(theirs), tmp_path / f"{name}-checkpoint")
        to_release(tmp_path / f"{name}-checkpoint", tmp_path / f"{name}-back")
        for path in theirs.folder.rglob("*"):
            if path.is_file():
                back = tmp_path / f"{name}-back" / path.relative_to(theirs.folder)
                assert back.read_bytes() == path.read_bytes(), path


def test_an_existing_target_is_kept_unless_told_otherwise(tmp_path, release):
    folder = save(release())
    to_release(folder, tmp_path / "out")
    with pytest.raises(UserError, match="exists"):
        to_release(folder, tmp_path / "out")
    to_release(folder, tmp_path / "out", overwrite=True)
    with pytest.raises(UserError, match="holds the model to convert"):
        to_release(folder, folder, overwrite=True)


def test_a_failure_half_way_leaves_nothing(tmp_path, release, monkeypatch):
    folder = save(release())
    before = {p.name for p in tmp_path.iterdir()}

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ai_jax.convert.to_release.shutil.copyfile", fail)
        with pytest.raises(KeyboardInterrupt):
            to_release(folder, tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == before
    to_release(folder, tmp_path / "out")
