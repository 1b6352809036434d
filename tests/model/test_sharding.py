import math

import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from ai_jax.config import ModelConfig, preset
from ai_jax.convert.mapping import expected
from ai_jax.model import omni
from ai_jax.model.sharding import RULES, spec


def mesh(**axes):
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


@pytest.fixture(scope="module")
def shapes():
    return expected(preset("model", "qwen2_5_omni_3b", ModelConfig))


def test_every_large_weight_of_the_3b_model_is_split_over_all_devices(shapes):
    devices = mesh(fsdp=8, tensor=2)
    for name, shape in shapes.items():
        axes = [axis for axis in spec(name, shape, devices) if axis]
        assert len(axes) == len(set(axes)) and len(spec(name, shape, devices)) == len(shape), name
        if not axes:
            assert len(shape) < 2 or name.endswith("audio_bos_eos_token.weight"), name
    split = [n for n, s in shapes.items() if set(spec(n, s, devices)) >= {"fsdp", "tensor"}]
    size = {n: math.prod(s) for n, s in shapes.items()}
    assert sum(size[n] for n in split) > 0.99 * sum(size.values())


def test_an_axis_that_is_absent_or_does_not_divide_is_left_whole():
    assert spec("lm_head.weight", (10, 8), mesh(fsdp=4)) == P(None, "fsdp")
    assert spec("lm_head.weight", (10, 8), mesh(fsdp=4, tensor=4)) == P(None, "fsdp")
    assert spec("lm_head.weight", (12, 9), mesh(fsdp=4, tensor=4)) == P("tensor", None)
    assert spec("model.norm.weight", (8,), mesh(fsdp=4, tensor=4)) == P(None)


def test_bias_and_rows_of_a_linear_map_are_split_alike(shapes):
    devices = mesh(fsdp=8, tensor=2)
    for name, shape in shapes.items():
        weight = name.removesuffix("bias") + "weight"
        if name.endswith("bias") and spec(name, shape, devices)[0]:
            assert spec(weight, shapes[weight], devices)[0] == spec(name, shape, devices)[0], name


def test_the_rules_cover_the_axes_of_every_model(tiny):
    assert set(RULES.values()) == {"fsdp", "tensor"}
    for name, leaf in omni.abstract_params(tiny).items():
        assert len(spec(name, leaf.shape, mesh(fsdp=2, tensor=2))) == len(leaf.shape)
