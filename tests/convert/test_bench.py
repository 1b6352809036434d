"""The benchmark of conversion: what it reports, what it leaves behind, peers that fail."""

import json
import shutil
import sys

import pytest

from ai_jax import cli
from ai_jax.convert import bench, bench_steps
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
    bench_steps.STEPS["default Orbax"]()(folder, tmp_path / "out")
    assert (tmp_path / "out" / "_CHECKPOINT_METADATA").is_file()


@pytest.mark.parametrize("change", ["missing", "short", "other"])
def test_a_difference_is_seen(folder, tmp_path, change):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert bench.same_files(folder, copy)
    shard = sorted(copy.glob("*.safetensors"))[-1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes({"missing": b"", "short": data[:-1], "other": data}[change])
    if change == "missing":
        shard.unlink()
    assert not bench.same_files(folder, copy)


def test_bad_places_are_refused(folder, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="not a folder"):
        bench.bench(folder, out=tmp_path / "nowhere")
    usage = shutil.disk_usage(tmp_path)._replace(free=1)
    monkeypatch.setattr(bench.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match="make room or choose another disk"):
        bench.bench(folder, out=tmp_path)


def _printed(report: bench.Report) -> str:
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as capture:
        console.print(bench.table(report))
    return capture.get()
