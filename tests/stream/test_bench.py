"""The stream benchmark: what it counts, without looking at the clock."""

from ai_jax.config import ModelConfig, from_dict, to_dict
from ai_jax.model import omni
from ai_jax.stream import bench
from ai_jax.stream.engine import Engine


def test_a_long_stream_compiles_nothing_and_keeps_its_memory(tiny, byte_tokenizer):
    data = to_dict(tiny)
    data["stream"] |= {"max_len": 100, "max_reply_tokens": 5, "threshold": 0.55}
    config = from_dict(ModelConfig, data)
    engine = Engine(config, omni.init_params(config, seed=0), byte_tokenizer)
    result = bench.run(engine, chunks=250, window=100)
    assert result.compiled == 0
    assert result.slides > 10
    assert result.grown < 16e6
    assert 0 < result.median <= result.p90
    assert result.real_time_factor == result.median / 0.4
    assert any("real-time factor" in line for line in result.lines())
