import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ai_jax.config import ModelConfig, preset
from ai_jax.convert import mapping
from ai_jax.errors import UserError


def test_the_3b_table_has_the_published_size():
    shapes = mapping.expected(preset("model", "qwen2_5_omni_3b", ModelConfig))
    # 1,442 tensors of the thinker, of which 518 belong to the vision tower.
    assert len(shapes) == 1442 - 518
    assert shapes["lm_head.weight"] == (151936, 2048)
    assert shapes["model.layers.35.self_attn.k_proj.weight"] == (256, 2048)
    assert shapes["audio_tower.conv1.weight"] == (1280, 128, 3)
    assert 3.9e9 < sum(map(math.prod, shapes.values())) < 4.1e9


@pytest.mark.parametrize("name", ["tiny", "nano"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_table_is_the_state_of_the_model(name, tied):
    from ai_jax.model import omni

    config = preset("model", name, ModelConfig)
    text = dataclasses.replace(config.text, tie_word_embeddings=tied)
    config = dataclasses.replace(config, text=text)
    state = {name: leaf.shape for name, leaf in omni.abstract_params(config).items()}
    assert mapping.expected(config) == state


@settings(deadline=None, max_examples=20)
@given(audio=st.integers(0, 3), text=st.integers(0, 3), prefix=st.sampled_from(["", "thinker."]))
def test_every_name_maps_there_and_back(audio, text, prefix):
    tiny = preset("model", "tiny", ModelConfig)
    config = dataclasses.replace(
        tiny,
        audio=dataclasses.replace(tiny.audio, encoder_layers=audio),
        text=dataclasses.replace(tiny.text, num_hidden_layers=text),
    )
    shapes = mapping.expected(config)
    theirs = {mapping.to_hf(name, prefix): shape for name, shape in shapes.items()}
    assert {mapping.to_ours(name, prefix): shape for name, shape in theirs.items()} == shapes
    found = mapping.partition(config, theirs, "here")
    assert found.prefix == prefix
    assert found.params == {name: mapping.to_hf(name, prefix) for name in shapes}
    assert found.carried == ()


def test_a_tied_head_that_a_folder_still_holds_is_carried(tiny):
    text = dataclasses.replace(tiny.text, tie_word_embeddings=True)
    tied = dataclasses.replace(tiny, text=text)
    found = mapping.partition(tied, mapping.expected(tiny), "here")
    assert found.carried == ("lm_head.weight",)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.mlp.up_proj.weight",  # one layer more than the config has
        "model.layers.0.mlp.up_proj.bias",
        "model.layers.00.mlp.up_proj.weight",
        "audio_tower.positional_embedding",
        "thinker.model.extra",
        "talkers.x",
        "",
    ],
)
def test_a_tensor_without_a_place_is_named(tiny, name):
    with pytest.raises(UserError, match=f"'{name}'.* no place"):
        mapping.partition(tiny, mapping.expected(tiny) | {name: (1,)}, "here")


def test_a_prefixed_folder_may_not_mix_in_bare_names(tiny):
    shapes = {f"thinker.{k}": v for k, v in mapping.expected(tiny).items()}
    with pytest.raises(UserError, match=r"'model\.norm\.weight'.* no place.*'thinker\.model\.norm"):
        mapping.partition(tiny, shapes | {"model.norm.weight": (48,)}, "here")


def test_each_missing_tensor_is_named(tiny):
    shapes = mapping.expected(tiny)
    for name in shapes:
        rest = {k: v for k, v in shapes.items() if k != name}
        with pytest.raises(UserError, match=f"'{name}' is missing"):
            mapping.partition(tiny, rest, "here")


def test_each_misshapen_tensor_is_named_with_both_shapes(tiny):
    shapes = mapping.expected(tiny)
    for name, shape in shapes.items():
        wrong = (*shape, 1)
        with pytest.raises(UserError) as e:
            mapping.partition(tiny, shapes | {name: wrong}, "here")
        assert all(part in str(e.value) for part in (f"'{name}'", str([*shape]), str([*wrong])))
