"""The benchmark of conversion: what it reports, what it leaves behind, peers that fail."""

import errno
import importlib.util
import json
import shutil
import sys

import numpy as np
import pytest

from ai_jax import cli
from ai_jax.convert import bench, bench_steps
from ai_jax.convert.load import packaged
from ai_jax.errors import UserError


@pytest.fixture
def folder(source):
    model = source()
    return model.save(shards=[list(model.tensors)[::2], list(model.tensors)[1::2]])


def test_ours_comes_back_identical_and_nothing_is_left(folder, tmp_path, monkeypatch, capsys):
    place = tmp_path / "place"
    place.mkdir()
    before = sorted(path.name for path in folder.iterdir())
    arguments = ["bench", "convert", str(folder), "--out", str(place), "--ours-only", "--json"]
    monkeypatch.setattr(sys, "argv", ["ai-jax", *arguments])
    cli.main()
    report = json.loads(capsys.readouterr().out)
    rows = {row["step"]: row for row in report["rows"]}
    assert list(rows) == ["copy", "from-hf", "to-hf"]
    assert [row["identical"] for row in rows.values()] == [True, None, True]
    for row in rows.values():
        assert row["ratio"] == pytest.approx(row["seconds"] / rows["copy"]["seconds"])
        assert row["mb_per_s"] == pytest.approx(report["bytes"] / row["seconds"] / 1e6)
        assert row["peak_bytes"] >= row["imported_bytes"] > 10e6
    assert rows["copy"]["written_bytes"] == report["bytes"]
    assert report["place"] == str(place) and report["free_bytes"] > report["bytes"]
    assert list(place.iterdir()) == []
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_step_that_fails_says_why_and_the_others_go_on(folder, tmp_path, monkeypatch):
    def measure(step, source, out):
        if step == "default Orbax":
            return {"reason": "MemoryError: no more"}
        shutil.copytree(source, out)
        return {"seconds": 2.0 if step == "copy" else 3.0, "peak_bytes": 9, "imported_bytes": 1}

    monkeypatch.setattr(bench, "_measure", measure)
    report = bench.bench(folder, out=tmp_path, rounds=2)
    rows = {row.step: row for row in report.rows}
    assert rows["default Orbax"] == bench.Row("default Orbax", reason="MemoryError: no more")
    assert rows["save_pretrained"].ratio == 1.5
    assert "default Orbax did not run: MemoryError: no more" in _printed(report)


def test_the_reason_is_what_the_step_said_last(folder, tmp_path):
    (folder / "config.json").unlink()
    assert "config.json" in bench._measure("from-hf", folder, tmp_path / "out")["reason"]


def test_default_orbax_holds_the_tensors(folder, tmp_path):
    import orbax.checkpoint as ocp
    from safetensors.numpy import load_file

    bench_steps.STEPS["default Orbax"]()(folder, tmp_path / "out")
    expected = {k: v for shard in folder.glob("*.safetensors") for k, v in load_file(shard).items()}
    found = ocp.StandardCheckpointer().restore(tmp_path / "out")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert np.asarray(found[name]).tobytes() == tensor.tobytes(), name


@pytest.mark.torch
def test_save_pretrained_holds_the_tensors(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from safetensors.numpy import load_file

    bench_steps.STEPS["save_pretrained"]()(packaged(), tmp_path / "out")
    expected = load_file(packaged() / "model.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert expected.keys() == found.keys()
    assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="PyTorch is installed")
def test_a_peer_that_is_not_installed_is_named(folder, tmp_path):
    reason = bench._measure("save_pretrained", folder, tmp_path / "out")["reason"]
    assert "No module named 'torch'" in reason


def test_an_interruption_leaves_nothing(folder, tmp_path, monkeypatch):
    place = tmp_path / "place"
    place.mkdir()

    def measure(step, source, out):
        shutil.copytree(source, out)
        if step == "to-hf":
            raise KeyboardInterrupt
        return {"seconds": 1.0, "peak_bytes": 9, "imported_bytes": 1}

    monkeypatch.setattr(bench, "_measure", measure)
    with pytest.raises(KeyboardInterrupt):
        bench.bench(folder, out=place)
    assert list(place.iterdir()) == []


def test_a_file_that_is_not_carried_is_named(folder, tmp_path, monkeypatch):
    """The converter's own list of what it carries is no measure of what came back."""
    (folder / "nested").mkdir()
    for name in ("code.py", ".gitattributes", "old.bin", "nested/notes.txt"):
        (folder / name).write_text("x")

    def measure(step, source, out):  # the same steps in this process, which is faster
        bench_steps.STEPS[step]()(source, out)
        return {"seconds": 1.0, "peak_bytes": 9, "imported_bytes": 1}

    monkeypatch.setattr(bench, "_measure", measure)
    report = bench.bench(folder, out=tmp_path, ours_only=True)
    rows = {row.step: row for row in report.rows}
    assert rows["copy"].identical and rows["copy"].differing == ()
    assert rows["to-hf"].identical is False
    assert rows["to-hf"].differing == ("nested/notes.txt", "old.bin")
    printed = _printed(report)
    assert "other or missing: nested/notes.txt, old.bin" in printed


@pytest.mark.parametrize("change", ["missing", "short", "other"])
def test_a_difference_is_seen(folder, tmp_path, change):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert bench.differences(folder, copy) == []
    shard = sorted(copy.glob("*.safetensors"))[-1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes({"missing": b"", "short": data[:-1], "other": data}[change])
    if change == "missing":
        shard.unlink()
    assert bench.differences(folder, copy) == [shard.name]


def test_bad_places_are_refused(folder, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="not a folder"):
        bench.bench(folder, out=tmp_path / "nowhere")
    inside = folder / "inside"
    inside.mkdir()
    for place in (folder, inside):
        with pytest.raises(UserError, match=r"lies inside .* choose a folder outside"):
            bench.bench(folder, out=place)
    monkeypatch.chdir(folder)  # where it writes when --out is not given
    with pytest.raises(UserError, match="lies inside"):
        bench.bench(folder)
    with (
        monkeypatch.context() as patch,
        pytest.raises(UserError, match=r"cannot write to .*: Read-only"),
    ):
        patch.setattr(bench.tempfile, "mkdtemp", _read_only)
        bench.bench(folder, out=tmp_path)
    usage = shutil.disk_usage(tmp_path)._replace(free=1)
    monkeypatch.setattr(bench.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match="make room or choose another disk"):
        bench.bench(folder, out=tmp_path)


def _read_only(*args):
    raise OSError(errno.EROFS, "Read-only file system")


def _printed(report: bench.Report) -> str:
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as capture:
        console.print(bench.table(report))
    return capture.get()


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="is not a folder; give a folder in Hugging Face format"):
        bench.bench(tmp_path / "nowhere")
