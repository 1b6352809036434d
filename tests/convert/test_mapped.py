"""Writing what is mapped: the same bytes whether the kernel copies them or we do."""

import errno
import os

import numpy as np
import pytest

from ai_jax.convert import mapped


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "source"
    path.write_bytes(np.random.default_rng(0).bytes(300_001))
    return mapped.MappedFile.open(path)


@pytest.mark.parametrize("way", ["kernel", "refused", "refused half-way", "another system"])
def test_the_bytes_of_a_view_are_appended(file, tmp_path, monkeypatch, way):
    send, calls = os.sendfile, []

    def half(out, source, offset, count):
        if calls or way == "refused":
            raise OSError(errno.EINVAL, "cannot")
        calls.append(count)
        return send(out, source, offset, count // 2)

    if way.startswith("refused"):
        monkeypatch.setattr(mapped.os, "sendfile", half)
    if way == "another system":
        monkeypatch.setattr(mapped.sys, "platform", "darwin")
    data = np.frombuffer(memoryview(file)[1:], np.uint16).reshape(-1, 100)
    with (tmp_path / "out").open("wb") as out:
        out.write(b"head")
        mapped.write_array(out, data[7:900])
        assert out.tell() == 4 + data[7:900].nbytes
        out.write(b"|")
        mapped.write_array(out, data[:, 3])  # not contiguous
        mapped.write_array(out, data[2:2])
        mapped.write_array(out, np.arange(3.0))
    want = b"head" + data[7:900].tobytes() + b"|" + data[:, 3].tobytes() + np.arange(3.0).tobytes()
    assert (tmp_path / "out").read_bytes() == want


def test_a_full_disk_is_not_taken_for_a_file_system_that_cannot(file, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(mapped.os, "sendfile", full)
    with (tmp_path / "out").open("wb") as out, pytest.raises(OSError, match="No space left"):
        mapped.write_array(out, np.frombuffer(file, np.uint8))


def test_the_descriptor_is_closed_with_the_file(tmp_path):
    (tmp_path / "source").write_bytes(b"content")
    file = mapped.MappedFile.open(tmp_path / "source")
    descriptor = file.descriptor
    os.fstat(descriptor)
    del file
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "empty").touch()
    before = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    with pytest.raises(ValueError):
        mapped.MappedFile.open(tmp_path / "empty")
    after = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    assert len(after) == len(before)
