import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ai_jax.config import ModelConfig, preset
from ai_jax.convert.hf import from_hf_config, to_hf_config
from ai_jax.errors import UserError

# What the published Qwen2.5-Omni-3B says, as transformers 4 wrote it.
PUBLISHED = {
    "model_type": "qwen2_5_omni",
    "thinker_config": {
        "model_type": "qwen2_5_omni_thinker",
        "audio_token_index": 151646,
        "audio_config": {
            "activation_function": "gelu",
            "d_model": 1280,
            "encoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "encoder_layers": 32,
            "max_source_positions": 1500,
            "n_window": 100,
            "num_mel_bins": 128,
            "output_dim": 2048,
            "scale_embedding": False,
        },
        "text_config": {
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "max_position_embeddings": 32768,
            "max_window_layers": 70,
            "num_attention_heads": 16,
            "num_hidden_layers": 36,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default"},
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
    },
}


def test_the_published_config_is_our_preset():
    ours = preset("model", "qwen2_5_omni_3b", ModelConfig)
    theirs = from_hf_config(PUBLISHED, name="qwen2_5_omni_3b", where="config.json")
    assert dataclasses.replace(theirs, stream=ours.stream) == ours
    assert theirs.stream.format == ours.stream.format


@given(
    name=st.sampled_from(["tiny", "nano", "qwen2_5_omni_3b"]),
    tied=st.booleans(),
    head_dim=st.sampled_from([2, 6, 12, 128]),
    n_window=st.sampled_from([10, 20, 30, 40]),
)
def test_a_config_survives_the_trip(name, tied, head_dim, n_window):
    config = preset("model", name, ModelConfig)
    config = dataclasses.replace(
        config,
        audio=dataclasses.replace(config.audio, n_window=n_window),
        text=dataclasses.replace(config.text, tie_word_embeddings=tied, head_dim=head_dim),
        mel=dataclasses.replace(config.mel, chunk_frames=2 * n_window),
    )
    theirs = to_hf_config(config, np.dtype(np.float32))
    assert sum(theirs["text_config"]["rope_parameters"]["mrope_section"]) == head_dim // 2
    back = from_hf_config(theirs, name=name, where="config.json")
    assert (back.audio, back.text, back.mel) == (config.audio, config.text, config.mel)
    assert back.stream.format.audio == config.stream.format.audio


def test_a_small_vocabulary_keeps_its_controls_in_the_last_rows(tiny):
    theirs = to_hf_config(tiny, np.dtype(np.float32))
    theirs["audio_token_index"] = 151646
    made = from_hf_config(theirs, name="x", where="config.json").stream.format
    assert (made.silent, made.response) == (318, 319)
    assert made.audio == 316 and made.eos == tiny.stream.format.eos


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("audio_config", "activation_function", "relu"),
        ("audio_config", "scale_embedding", True),
        ("audio_config", "d_model", "wide"),
        ("audio_config", "n_window", 21),
        ("text_config", "hidden_act", "gelu"),
        ("text_config", "use_sliding_window", True),
        ("text_config", "rope_parameters", {"rope_type": "yarn", "factor": 4}),
        ("text_config", "num_attention_heads", 3),
    ],
)
def test_a_variant_that_the_model_is_not_is_refused(tiny, section, key, value):
    theirs = to_hf_config(tiny, np.dtype(np.float32))
    theirs[section] = theirs[section] | {key: value}
    with pytest.raises(UserError, match=f"config.json: .*{key.split('_')[0]}"):
        from_hf_config(theirs, name="x", where="config.json")
