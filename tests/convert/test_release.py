"""Opening folders of the authors: what is where, and every refusal."""

import dataclasses
import json
import sys

import numpy as np
import pytest
from release_double import TOWER, Release
from safetensors.numpy import save_file

from ai_jax.config import to_dict
from ai_jax.convert import hf
from ai_jax.convert.from_release import from_release
from ai_jax.convert.open import open_source
from ai_jax.convert.release import is_release, open_release
from ai_jax.convert.release_config import stream_format
from ai_jax.convert.to_hf import to_hf
from ai_jax.errors import UserError
from ai_jax.tokens import RELEASE

SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def release(tmp_path, tiny):
    def make(name="release", config=tiny, **kwargs) -> Release:
        return Release(tmp_path / name, config, **kwargs)

    return make


def save(theirs, **kwargs):
    """With the tower in safetensors, for which torch is not needed."""
    return theirs.save(tower="safetensors", **kwargs)


def refuse(folder, *parts):
    with pytest.raises(UserError) as e:
        open_release(folder)
    assert all(part in str(e.value) for part in parts), e.value
    assert "\n" not in str(e.value)


# What a folder is.


def test_folders_of_the_authors_are_told_from_others(tmp_path, release, source):
    theirs = release()
    theirs.yaml = None
    assert is_release(save(theirs)) and open_source(theirs.folder).kind == "release"
    theirs = release("config")
    theirs.decoder = {}
    assert is_release(save(theirs, shards=0, index=False))
    other = source().save()
    (other / "spk_dict.pt").write_bytes(b"the voices of Qwen2.5-Omni")
    assert not is_release(other) and open_source(other).kind == "hf"
    alone = tmp_path / "alone"
    alone.mkdir()
    assert not is_release(alone)
    (alone / "lit_model.pth").touch()
    assert is_release(alone)


def test_names_and_parts(release, tiny):
    theirs = release()
    theirs.beside["tokenizer.json"] = "{}"
    source = open_release(save(theirs))
    got = dict(source.fetch(list(source.specs)))
    heads = tiny.text.num_attention_heads * tiny.text.head_dim
    keys = tiny.text.num_key_value_heads * tiny.text.head_dim
    for kind in ("weight", "bias"):
        fused = theirs.decoder[f"transformer.h.1.attn.qkv.{kind}"]
        q, k, v = (got[f"model.layers.1.self_attn.{part}_proj.{kind}"] for part in "qkv")
        assert q.shape[0] == heads and k.shape[0] == v.shape[0] == keys
        np.testing.assert_array_equal(np.concatenate([q, k, v]), fused)
    for ours, name in {
        "lm_head.weight": "lm_head.weight",
        "model.embed_tokens.weight": "transformer.wte.weight",
        "model.norm.weight": "transformer.ln_f.weight",
        "model.layers.2.input_layernorm.weight": "transformer.h.2.norm_1.weight",
        "model.layers.2.post_attention_layernorm.weight": "transformer.h.2.norm_2.weight",
        "model.layers.0.self_attn.o_proj.weight": "transformer.h.0.attn.proj.weight",
        "model.layers.0.mlp.gate_proj.weight": "transformer.h.0.mlp.fc_1.weight",
        "model.layers.0.mlp.up_proj.weight": "transformer.h.0.mlp.fc_2.weight",
        "model.layers.0.mlp.down_proj.weight": "transformer.h.0.mlp.proj.weight",
    }.items():
        np.testing.assert_array_equal(got[ours], theirs.decoder[name])
    for name, tensor in theirs.tower.items():
        np.testing.assert_array_equal(got[f"audio_tower.{name}"], tensor)
    assert not source.carried and source.config.name == "release"
    assert source.tokenizer == theirs.folder / "tokenizer.json"
    assert "qwen25OmniConfig.preprocessor_config.json" in source.files


def test_the_adapter_counts_more_than_the_towers_own(release):
    theirs = release(adapter=True)
    source = open_release(save(theirs))
    _, got = next(source.fetch(["audio_tower.proj.weight"]))
    np.testing.assert_array_equal(got, theirs.decoder["audio_adapter.weight"])
    assert not np.array_equal(got, theirs.tower["proj.weight"])


@pytest.mark.parametrize("same", [True, False])
def test_a_head_beside_tied_embeddings_counts_if_it_differs(release, same):
    theirs = release()
    theirs.omni["thinker_config"]["tie_word_embeddings"] = True
    if same:
        theirs.decoder["lm_head.weight"] = theirs.decoder["transformer.wte.weight"]
    source = open_release(save(theirs))
    assert source.config.text.tie_word_embeddings == same
    assert ("lm_head.weight" in source.specs) != same


@pytest.mark.parametrize("omni_in", ["qwen25OmniConfig", "."])
def test_a_release_becomes_a_folder_of_hugging_face(tmp_path, release, tiny, omni_in):
    """With all that lay beside it, which must not make it a release again."""
    theirs = release(grouped=True, adapter=True)
    theirs.omni_in = omni_in
    from_release(save(theirs), tmp_path / "checkpoint")
    to_hf(tmp_path / "checkpoint", tmp_path / "hf")
    there, back = open_source(theirs.folder), open_source(tmp_path / "hf")
    assert back.kind == "hf" and back.config == there.config
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == hf.THINKER
    got = dict(back.fetch(list(there.params)))
    for name, want in there.fetch(list(there.params)):
        np.testing.assert_array_equal(got[name], want, name)


# Configs.


def test_the_stream_format_is_the_authors(release, tiny):
    assert stream_format(151936, "") == RELEASE
    assert stream_format(151648, "") == RELEASE
    made = open_release(save(release())).config.stream.format
    assert made == stream_format(tiny.text.vocab_size, "")
    assert made.name == "release" and made.chunk_open == (319,)
    assert made.chunk_open[0] - made.silent == RELEASE.chunk_open[0] - RELEASE.silent
    with pytest.raises(UserError, match="x: a vocabulary of 45 has no room"):
        stream_format(45, "x")


def test_our_own_description_wins_and_is_kept(release, tiny):
    theirs = release()
    theirs.beside["ai_jax.json"] = json.dumps(to_dict(tiny) | {"provenance": {"seed": 7}})
    source = open_release(save(theirs))
    assert source.config == tiny and source.provenance["seed"] == 7


def test_the_config_may_lie_beside_the_weights(release, tiny):
    theirs = release()
    theirs.omni_in = "."
    source = open_release(save(theirs))
    assert (source.config.text, source.config.audio) == (tiny.text, tiny.audio)
    assert source.provenance["release"]["omni"] == "."


@pytest.fixture
def whisper(tiny):
    """A tower whose number of heads its width tells, as Whisper's."""
    audio = dataclasses.replace(tiny.audio, d_model=128, encoder_attention_heads=2)
    text = dataclasses.replace(tiny.text, max_position_embeddings=4096)
    return dataclasses.replace(tiny, audio=audio, text=text)


def test_without_a_config_of_qwen_shapes_tell_the_tower(release, whisper):
    theirs = release(config=whisper)
    theirs.omni = None
    config = open_release(save(theirs)).config
    assert (config.text, config.audio, config.mel) == (whisper.text, whisper.audio, whisper.mel)
    assert config.stream.format.name == "release"


def test_the_defaults_of_litgpt_are_known(release, whisper):
    text = dataclasses.replace(whisper.text, num_key_value_heads=4)
    theirs = release(config=dataclasses.replace(whisper, text=text))
    theirs.omni = None
    theirs.yaml |= {"n_query_groups": None, "head_size": None, "norm_eps": "1e-06"}
    assert open_release(save(theirs)).config.text == text


def test_a_width_that_does_not_tell_the_heads_is_refused(release):
    theirs = release()
    theirs.omni = None
    refuse(save(theirs), TOWER, "width 32", "qwen25OmniConfig")


@pytest.mark.parametrize(
    ("key", "value", "parts"),
    [
        ("n_layer", 4, ["n_layer is 4", "num_hidden_layers is 3", "config.json"]),
        ("n_embd", 64, ["n_embd is 64", "hidden_size is 48"]),
        ("n_query_groups", None, ["n_query_groups"]),
        ("head_size", 16, ["head_size is 16"]),
        ("padded_vocab_size", 512, ["padded_vocab_size is 512"]),
        ("rope_base", 10000, ["rope_base is 10000"]),
        ("norm_eps", 1e-5, ["norm_eps is 1e-05"]),
        ("intermediate_size", "wide", ["intermediate_size is 'wide'"]),
        ("norm_class_name", "LayerNorm", ["norm_class_name is 'LayerNorm'", "'RMSNorm'"]),
        ("attn_bias", False, ["attn_bias is False"]),
        ("rotary_percentage", 0.25, ["rotary_percentage is 0.25"]),
        ("rope_adjustments", {"factor": 8}, ["rope_adjustments"]),
    ],
)
def test_a_config_that_contradicts_is_refused(release, key, value, parts):
    theirs = release()
    theirs.yaml[key] = value
    if key == "n_query_groups":
        parts = ["n_query_groups is 4", "num_key_value_heads is 2"]
    refuse(save(theirs), "model_config.yaml", *parts)


def test_configs_that_are_damaged_missing_or_twice_are_refused(release):
    folder = save(release())
    omni = folder / "qwen25OmniConfig" / "config.json"
    (folder / "model_config.yaml").write_text("a: [")
    refuse(folder, "model_config.yaml is not readable YAML")
    (folder / "model_config.yaml").write_text("- a")
    refuse(folder, "model_config.yaml is not a mapping")
    content = omni.read_text()
    omni.write_text("{")
    refuse(folder, "config.json is not readable JSON")
    omni.write_text('{"model_type": "qwen2"}')
    (folder / "model_config.yaml").unlink()
    refuse(folder, "says nowhere what model it is")
    omni.write_text(content)
    (folder / "config.json").write_text(content)
    refuse(folder, "both hold a config of Qwen2.5-Omni")


def test_a_key_that_is_needed_is_named(release, whisper):
    theirs = release(config=whisper)
    theirs.omni = None
    del theirs.yaml["n_layer"]
    refuse(save(theirs), "model_config.yaml", "'n_layer' is missing")


# Weights.


@pytest.mark.parametrize("index", [True, False])
def test_a_missing_shard_is_refused(release, index):
    folder = save(release(), index=index)
    (folder / SHARD).unlink()
    refuse(folder, SHARD, "missing")


def test_a_missing_file_is_refused(release):
    folder = save(release())
    (folder / f"{TOWER}.safetensors").unlink()
    refuse(folder, "lacks the audio tower", f"{TOWER}.pth")
    theirs = release("other")
    theirs.decoder = {}
    refuse(save(theirs, shards=0, index=False), "lacks the decoder")


@pytest.mark.parametrize("part", ["decoder", "tower"])
def test_an_unknown_tensor_is_refused(release, part):
    theirs = release()
    name = {"decoder": "transformer.h.3.norm_1.weight", "tower": "layers.2.fc1.bias"}[part]
    getattr(theirs, part)[name] = np.ones(48, np.float32)
    refuse(save(theirs), f"'{name}'", "no place", "nearest")


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("decoder", "transformer.wte.weight"),
        ("decoder", "lm_head.weight"),
        ("decoder", "transformer.h.2.attn.qkv.bias"),
        ("tower", "ln_post.bias"),
        ("tower", "audio_bos_eos_token.weight"),
    ],
)
def test_a_missing_tensor_is_refused(release, part, name):
    theirs = release()
    del getattr(theirs, part)[name]
    refuse(save(theirs), f"'{name}' is missing")


def test_half_an_adapter_or_none_is_refused(release):
    theirs = release(adapter=True)
    del theirs.decoder["audio_adapter.bias"]
    refuse(save(theirs), "'audio_adapter.bias' is missing")
    theirs = release("neither", tower_proj=False)
    refuse(save(theirs), "'proj.weight' is missing", "'audio_adapter.weight'")


def test_wrong_rows_of_a_fused_tensor_are_refused(release):
    theirs = release()
    name = "transformer.h.1.attn.qkv.weight"
    theirs.decoder[name] = theirs.decoder[name][:-12]
    refuse(save(theirs), f"'{name}'", "[84, 48]", "[96, 48]", "48 + 24 + 24 rows")


def test_a_transposed_tensor_is_refused(release):
    theirs = release()
    name = "transformer.h.0.mlp.proj.weight"
    theirs.decoder[name] = np.ascontiguousarray(theirs.decoder[name].T)
    refuse(save(theirs), f"'{name}'", "[48, 96]")


def test_both_orders_at_once_are_refused(release):
    theirs = release()
    name = "transformer.h.1.attn.{}.weight"
    theirs.decoder[name.format("attn")] = theirs.decoder[name.format("qkv")]
    refuse(save(theirs), f"'{name.format('attn')}'", "'transformer.h.0.attn.qkv", "two orders")


def test_a_quantised_tensor_is_refused(release):
    theirs = release()
    theirs.decoder["lm_head.weight"] = theirs.decoder["lm_head.weight"].astype(np.int8)
    refuse(save(theirs), "'lm_head.weight' is int8")


def test_a_tensor_in_two_files_is_refused(release):
    theirs = release()
    folder = save(theirs)
    save_file(theirs.decoder, folder / "old.safetensors")
    refuse(folder, "hold the same model")


def test_a_file_of_neither_part_is_refused(release):
    folder = save(release())
    save_file({"foo": np.ones(2, np.float32)}, folder / "extra.safetensors")
    refuse(folder, "extra.safetensors belongs to neither", "foo")


def test_what_is_no_folder_is_refused(tmp_path, release):
    refuse(tmp_path / "nowhere", "nowhere is not a folder")
    folder = save(release())
    (folder / SHARD).write_bytes(b"\xff" * 100)
    refuse(folder, SHARD, "not a whole safetensors file")


def test_without_torch_the_extra_is_named(release, monkeypatch):
    theirs = release()
    folder = save(theirs)
    (folder / f"{TOWER}.safetensors").rename(folder / f"{TOWER}.pth")
    monkeypatch.setitem(sys.modules, "torch", None)
    refuse(folder, f"{TOWER}.pth", 'pip install "ai-jax[torch]"')
