"""The two orders of fused queries, keys and values."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ai_jax.config import ModelConfig, preset
from ai_jax.convert import litgpt

TINY = preset("model", "tiny", ModelConfig).text


def text(groups, heads, head_dim):
    shape = {"num_key_value_heads": groups, "num_attention_heads": groups * heads}
    return dataclasses.replace(TINY, **shape, head_dim=head_dim)


@pytest.mark.parametrize(
    ("order", "rows"),
    [
        ("concatenated", "q0 q0 q1 q1 q2 q2 q3 q3 k0 k0 k1 k1 v0 v0 v1 v1"),
        ("grouped", "q0 q0 q1 q1 k0 k0 v0 v0 q2 q2 q3 q3 k1 k1 v1 v1"),
    ],
)
def test_rows_of_two_groups_of_two_heads(order, rows):
    """Rows are named by what they belong to, two for each head."""
    fused = np.array(rows.split())
    q, k, v = (litgpt.part(fused, i, order, text(2, 2, 2)) for i in range(3))
    assert q.tolist() == "q0 q0 q1 q1 q2 q2 q3 q3".split()
    assert k.tolist() == "k0 k0 k1 k1".split() and v.tolist() == "v0 v0 v1 v1".split()


@given(
    st.sampled_from(["concatenated", "grouped"]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([2, 4, 6]),
    st.sampled_from([(), (3,)]),
)
def test_fusing_and_taking_apart_undo_each_other(order, groups, heads, head_dim, rest):
    config = text(groups, heads, head_dim)
    rows = groups * (heads + 2) * head_dim
    fused = np.arange(rows * int(np.prod(rest)), dtype=np.float32).reshape(rows, *rest)
    parts = [litgpt.part(fused, i, order, config) for i in range(3)]
    np.testing.assert_array_equal(litgpt.fuse(parts, order, config), fused)


def test_concatenated_parts_are_views():
    fused = np.zeros((96, 48), np.float32)
    for i in range(3):
        assert np.shares_memory(litgpt.part(fused, i, "concatenated", TINY), fused)


def test_a_config_survives_the_trip(tmp_path):
    config = preset("model", "qwen2_5_omni_3b", ModelConfig)
    path = tmp_path / "model_config.yaml"
    litgpt.write_config(path, config)
    back = litgpt.text_config(path)
    assert back == dataclasses.replace(config.text, max_position_embeddings=config.stream.max_len)
    litgpt.check_config(path, config.text, "here")
