"""transformers reads what we write, and computes the same before and after a round trip."""

import logging

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import jax
import jax.numpy as jnp
import torch
from flax import nnx
from tokenizers import Tokenizer, decoders
from transformers import AutoTokenizer
from transformers import Qwen2_5OmniThinkerForConditionalGeneration as Thinker

from ai_jax.convert import mapping
from ai_jax.convert.from_hf import from_hf
from ai_jax.convert.hf_folder import write_model_folder
from ai_jax.convert.load import load
from ai_jax.convert.to_hf import to_hf
from ai_jax.model import cache, omni

pytestmark = pytest.mark.torch


@pytest.fixture
def exported(tmp_path, tiny, byte_tokenizer):
    tokenizer = Tokenizer.from_str(byte_tokenizer._tokenizer.to_str())
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    rng = np.random.default_rng(2)
    shapes = mapping.expected(tiny)
    params = {k: rng.normal(0, 0.3, v).astype(np.float32) for k, v in shapes.items()}
    out = tmp_path / "exported"
    write_model_folder(tiny, params, out, tmp_path / "tokenizer.json", {}, dtype="float32")
    return out


def inputs(config):
    rng = np.random.default_rng(3)
    tokens = [*config.stream.format.chunk(10), 7, 8, *config.stream.format.chunk(10), 9]
    mel_bfm = rng.normal(size=(2, config.audio.chunk_frames, config.mel.n_mels))
    return np.array([tokens]), mel_bfm.astype(np.float32)


def thinker_logits(model, config):
    """float32 [1, t, v] for two chunks of sound and some text."""
    tokens_bt, mel_bfm = inputs(config)
    mel = torch.from_numpy(mel_bfm.reshape(1, -1, config.mel.n_mels)).transpose(1, 2)
    # Without vision, positions are one counter on all three axes.
    positions = torch.arange(tokens_bt.shape[1]).expand(3, 1, -1)
    with torch.no_grad():
        return model(
            input_ids=torch.from_numpy(tokens_bt),
            input_features=mel,
            feature_attention_mask=torch.ones(1, mel.shape[-1], dtype=torch.long),
            position_ids=positions,
        ).logits.numpy()


def read_quietly(folder, caplog):
    """The model that transformers reads; no weight may be missing, left over or misfit."""
    caplog.clear()
    logger = logging.getLogger("transformers")
    propagate, logger.propagate = logger.propagate, True
    try:
        with caplog.at_level(logging.WARNING):
            model, report = Thinker.from_pretrained(
                folder, dtype=torch.float32, output_loading_info=True
            )
    finally:
        logger.propagate = propagate
    assert not any(report.values()), report
    assert not caplog.records, caplog.text
    return model.eval()


def test_an_export_loads_without_a_warning_and_computes_what_we_compute(exported, caplog):
    theirs = thinker_logits(read_quietly(exported, caplog), load(exported).config)
    loaded = load(exported)
    tokens_bt, mel_bfm = inputs(loaded.config)
    graphdef, state = nnx.split(omni.build(loaded.config, loaded.params))
    audio_bnd = omni.encode(graphdef, state, mel_bfm, jnp.full(2, mel_bfm.shape[1]))
    logits_bv, _ = jax.jit(omni.extend)(
        graphdef,
        state,
        cache.init_cache(loaded.config.text, 1, 64, jnp.float32),
        tokens_bt,
        audio_bnd.reshape(1, -1, audio_bnd.shape[-1]),
        jnp.array([tokens_bt.shape[1]]),
    )
    np.testing.assert_allclose(logits_bv[0], theirs[0, -1], atol=1e-4, rtol=0)


def test_the_tokenizer_loads(exported, byte_tokenizer):
    tokenizer = AutoTokenizer.from_pretrained(exported)
    text = "Hello, Größe 你好!"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids == byte_tokenizer.encode(text)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_of_transformers_computes_the_same_after_the_trip(
    tmp_path, exported, dtype, caplog
):
    config = load(exported).config
    original = tmp_path / "original"
    Thinker.from_pretrained(exported, dtype=dtype).save_pretrained(original)
    from_hf(original, tmp_path / "checkpoint")
    to_hf(tmp_path / "checkpoint", tmp_path / "back")
    before = thinker_logits(read_quietly(original, caplog), config)
    after = thinker_logits(read_quietly(tmp_path / "back", caplog), config)
    np.testing.assert_array_equal(before, after)
    name = "model.safetensors"
    assert (original / name).read_bytes() == (tmp_path / "back" / name).read_bytes()
