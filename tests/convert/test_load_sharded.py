"""Weights straight onto a mesh, in one process and in two."""

import os
import socket
import subprocess
import sys

import pytest

from ai_jax.convert.from_hf import from_hf

CHECK = """
import sys
import jax, numpy as np
from jax.sharding import AxisType
from ai_jax.convert import load, shards

folder, checkpoint, process, port = sys.argv[1:]
if port != "0":
    jax.distributed.initialize(f"localhost:{port}", 2, int(process))
mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
whole = load.load(folder).params
copied = 0
aligned = shards.aligned

def count(tensor, dtype, **kwargs):
    global copied
    copied += tensor.nbytes
    return aligned(tensor, dtype, **kwargs)

shards.aligned = count
for path in (folder, checkpoint):
    for dtype in (None, np.float32):
        copied = 0
        params = load.load_sharded(path, mesh, dtype).params
        assert params.keys() == whole.keys()
        for name, value in params.items():
            assert value.dtype == (dtype or whole[name].dtype), name
            for shard in value.addressable_shards:
                want = whole[name][shard.index].astype(value.dtype)
                assert np.asarray(shard.data).tobytes() == want.tobytes(), name
        size = sum(v.nbytes for v in whole.values())
        shards_of = params["model.layers.0.mlp.up_proj.weight"].addressable_shards
        rows = [s.data.shape for s in shards_of]
        assert set(rows) == {(48, 24)}, rows
        if path == folder and port != "0":
            assert copied < 0.7 * size, (copied, size)  # its half, and what is whole everywhere
print("fine")
"""


@pytest.fixture
def paths(tmp_path, source, byte_tokenizer):
    folder = source(full=True).save()
    byte_tokenizer._tokenizer.save(str(folder / "tokenizer.json"))
    from_hf(folder, tmp_path / "checkpoint")
    return folder, tmp_path / "checkpoint"


def start(paths, process, port, devices):
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    command = [sys.executable, "-c", CHECK, *map(str, paths), str(process), str(port)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process):
    out, err = process.communicate(timeout=200)
    assert out == b"fine\n", err.decode()[-2000:]


def test_a_mesh_in_one_process(paths):
    finish(start(paths, 0, 0, devices=4))


def test_each_process_reads_its_own_part(paths):
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    processes = [start(paths, i, port, devices=2) for i in range(2)]
    for process in processes:
        finish(process)
