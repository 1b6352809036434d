"""The scripts for users: bad input is refused before anything is written."""

import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.mark.parametrize("option", [("--layers", "0"), ("--layers", "-1"), ("--shard-gb", "0")])
def test_sizes_of_a_random_checkpoint(option, tmp_path, monkeypatch, capsys):
    arguments = [str(tmp_path / "out"), "--model", "tiny", *option]
    monkeypatch.setattr(sys, "argv", ["random_checkpoint.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(SCRIPTS / "random_checkpoint.py"), run_name="__main__")
    assert stopped.value.code == 2
    assert "must be above zero" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
