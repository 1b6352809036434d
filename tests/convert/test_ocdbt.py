"""Databases written by us are read by TensorStore."""

import numpy as np
import pytest
import tensorstore as ts

from ai_jax.convert import ocdbt


def read(folder):
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/"}).result()
    return {key.decode(): store[key] for key in store.list().result()}


def values(count):
    """Keys that share beginnings of all lengths, values of nothing up to kilobytes."""
    rng = np.random.default_rng(0)
    keys = {"/".join(map(str, rng.integers(0, 12, rng.integers(1, 9)))) for _ in range(count)}
    return {key + "é" * (i % 3): rng.bytes(i % 1000) for i, key in enumerate(sorted(keys))}


def write(folder, content):
    folder.mkdir()
    with ocdbt.Writer(folder) as database:
        for key, value in content.items():
            database.put(key, value[:5], value[5:])


@pytest.mark.parametrize("count", [1, 2, 3000])
def test_tensorstore_reads_all_values(tmp_path, count):
    content = values(count)
    write(tmp_path / "database", content)
    assert read(tmp_path / "database") == content


def test_the_same_values_give_the_same_files(tmp_path):
    files = []
    for name in "ab":
        write(tmp_path / name, values(100))
        paths = [p for p in (tmp_path / name).rglob("*") if p.is_file()]
        files.append({p.relative_to(tmp_path / name): p.read_bytes() for p in paths})
    assert files[0] == files[1]


def test_a_damaged_node_is_noticed(tmp_path):
    """The checksum is there and it is right: TensorStore compares it."""
    write(tmp_path / "database", {"key": b"value"})
    file = tmp_path / "database" / "d" / "values"
    data = bytearray(file.read_bytes())
    data[data.index(b"key")] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match="CRC"):
        read(tmp_path / "database")


def test_what_ends_with_an_error_is_no_database(tmp_path):
    with pytest.raises(KeyboardInterrupt), ocdbt.Writer(tmp_path) as database:
        database.put("key", b"value")
        raise KeyboardInterrupt
    assert not (tmp_path / "manifest.ocdbt").exists()
