"""transformers reads a whole Omni after each conversion: its weights, tokenizer and sounds."""

import json

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file, save_file
from tiny_omni import Omni, read_quietly, save_omni, save_tokenizer
from tiny_run import write_tokenizer
from tokenizers import Tokenizer
from transformers import AutoFeatureExtractor, AutoTokenizer, GenerationConfig
from transformers import Qwen2_5OmniThinkerForConditionalGeneration as Thinker

from ai_jax.convert import mapping, shards
from ai_jax.convert.from_hf import from_hf
from ai_jax.convert.hf_folder import write_model_folder
from ai_jax.convert.load import load
from ai_jax.convert.to_hf import to_hf

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def omni(tmp_path_factory):
    """The 3B's proportions and its whole vocabulary, in shards, and its checkpoint."""
    folder = tmp_path_factory.mktemp("omni") / "Omni"
    save_omni(folder, "3B", 151936, torch.bfloat16, max_shard_size="25MB")
    save_tokenizer(folder)
    sounds = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "image_processor_type": "Qwen2VLImageProcessor",
        "feature_size": 128,
        "hop_length": 160,
        "n_fft": 400,
        "sampling_rate": 16000,
        "chunk_length": 300,
        "patch_size": 14,
        "processor_class": "Qwen2_5OmniProcessor",
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(sounds))
    from_hf(folder, folder.with_name("checkpoint"))
    return folder


@pytest.fixture(scope="module")
def original(omni):
    return Omni.from_pretrained(omni)


def assert_equal(model, original):
    """The same weights, to the bit unless cast; those of vision may have been left behind."""
    got, want = (
        {name: tensor for name, tensor in m.state_dict().items() if "visual" not in name}
        for m in (model, original)
    )
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert torch.equal(tensor, want[name].to(tensor.dtype)), name


@pytest.mark.parametrize(
    ("size", "dtype", "limit"),
    [
        ("7B", torch.float32, "1GB"),
        ("7B", torch.float16, "100KB"),
        ("3B", torch.bfloat16, "1GB"),
    ],
)
def test_a_whole_omni_comes_back_to_the_byte(tmp_path, size, dtype, limit):
    folder = save_omni(tmp_path / "omni", size, 400, dtype, limit)
    assert (folder / shards.INDEX).exists() == (limit != "1GB")
    from_hf(folder, tmp_path / "checkpoint")
    back = tmp_path / "back"
    to_hf(tmp_path / "checkpoint", back)
    (back / "ai_jax.json").unlink()
    assert {p.name for p in back.iterdir()} == {p.name for p in folder.iterdir()}
    for path in folder.iterdir():
        assert (back / path.name).read_bytes() == path.read_bytes(), path.name
    model = read_quietly(Omni, back)
    assert (model.thinker.dtype, model.token2wav.dtype) == (dtype, torch.float32)
    assert "Chelsie" in Omni.from_pretrained(back).speaker_map


@pytest.mark.parametrize(
    ("skip", "dtype", "whole"),
    [
        ((), "float16", True),
        (("vision",), None, True),
        (("talker",), None, False),
        (("talker", "vision"), "float32", False),
    ],
)
def test_what_the_options_leave_is_read_without_a_warning(
    tmp_path, omni, original, skip, dtype, whole
):
    from_hf(omni, tmp_path / "checkpoint", skip=skip, dtype=dtype)
    to_hf(tmp_path / "checkpoint", tmp_path / "out")
    model = read_quietly(Omni if whole else Thinker, tmp_path / "out")
    assert_equal(model, original if whole else original.thinker)
    thinker = model.thinker if whole else model
    assert thinker.dtype == getattr(torch, dtype or "bfloat16")
    assert thinker.lm_head.weight.shape == (151936, 64)
    assert GenerationConfig.from_pretrained(tmp_path / "out").max_new_tokens == 77


def test_shards_of_another_size_are_read_without_a_warning(tmp_path, omni, original):
    to_hf(omni.with_name("checkpoint"), tmp_path / "out", shard_bytes=1_000_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    assert_equal(read_quietly(Omni, tmp_path / "out"), original)


def test_what_was_trained_is_read_without_a_warning(tmp_path, omni, original):
    before, out = load(omni), tmp_path / "out"
    params = {k: v.astype(np.float32) for k, v in before.params.items()}
    params["audio_tower.proj.bias"][:] = 3
    write_model_folder(before.config, params, out, None, {}, base=omni, dtype=None)
    model = read_quietly(Omni, out)
    trained, untrained = (m.thinker.model.audio_tower.proj.bias.data for m in (model, original))
    assert (trained == 3).all() and not (untrained == 3).any()
    trained.copy_(untrained)
    assert_equal(model, original)
    assert AutoTokenizer.from_pretrained(out).convert_tokens_to_ids("<response>") == 151666


def test_a_warning_would_be_noticed(tmp_path):
    folder = save_omni(tmp_path / "omni", "3B", 400, torch.float32)
    tensors = load_file(folder / "model.safetensors")
    del tensors["thinker.audio_tower.ln_post.bias"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for cls in (Omni, Thinker):
        with pytest.raises(AssertionError, match=r"audio_tower\.ln_post\.bias"):
            read_quietly(cls, folder)


# Tokenizer and sounds.


def test_the_controls_have_names_and_no_other_token_changes(tmp_path, omni):
    from_hf(omni, tmp_path / "checkpoint", skip=["talker"])
    to_hf(tmp_path / "checkpoint", tmp_path / "out")
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (omni, tmp_path / "out"))
    names = ["<silent>", "<response>"]
    assert after.convert_tokens_to_ids(names) == [151665, 151666]
    assert after.get_vocab() == before.get_vocab() | dict(zip(names, (151665, 151666), strict=True))
    assert (after.eos_token, after.pad_token) == ("<|im_end|>", "<|endoftext|>")
    text = "Größe 你好<|im_end|>"
    assert after(text).input_ids == before(text).input_ids
    assert after("<silent>").input_ids == [151665]
    assert after.decode([151665, 64, 151666], skip_special_tokens=True) == "a"
    # No text forges a control in our own reading of the same files.
    assert 151665 not in load(tmp_path / "out").tokenizer.encode("<silent>")
    embedding = shards.open_folder(tmp_path / "out")[mapping.EMBEDDING]
    assert embedding.shape == (151936, 64)


def test_controls_far_behind_the_last_token_have_their_own_ids(tmp_path, tiny):
    """Not the ids after the last token, which is where a tokenizer likes to put them."""
    params = {k: np.zeros(s, np.float32) for k, s in mapping.expected(tiny).items()}
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    write_model_folder(tiny, params, tmp_path / "out", tokenizer, {})
    for legacy in (False, True):
        if legacy:  # as transformers 4 has it
            config = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {}}
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
            write_model_folder(tiny, params, tmp_path / "out", tokenizer, {}, overwrite=True)
        got = AutoTokenizer.from_pretrained(tmp_path / "out")
        assert got.convert_tokens_to_ids(["<silent>", "<response>"]) == [300, 301]
        assert [got.decode(id) for id in (300, 301)] == ["<silent>", "<response>"]
        assert len(got) == 302 <= tiny.text.vocab_size
        assert got("a").input_ids == Tokenizer.from_file(str(tokenizer)).encode("a").ids


def test_sounds_become_as_many_mels_as_the_model_hears(tmp_path, omni, tiny):
    to_hf(omni.with_name("checkpoint"), tmp_path / "omni")
    params = {k: np.zeros(s, np.float32) for k, s in mapping.expected(tiny).items()}
    write_model_folder(tiny, params, tmp_path / "own", None, {})
    for folder, mels in (("omni", 128), ("own", 80)):
        extractor = AutoFeatureExtractor.from_pretrained(tmp_path / folder)
        heard = extractor(np.zeros(16000), sampling_rate=16000, padding="do_not_pad")
        assert np.shape(heard["input_features"]) == (1, mels, 100)
