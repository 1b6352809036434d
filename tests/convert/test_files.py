import os

import pytest

from ai_jax.convert.files import read_info, whole_folder, write_info
from ai_jax.errors import UserError


def make(path, text="new"):
    path.mkdir()
    (path / "config.json").write_text(text)


def test_a_folder_appears_whole(tmp_path):
    out = tmp_path / "deep" / "out"
    with whole_folder(out, overwrite=False) as folder:
        make(folder)
        assert not out.exists()
    assert [p.name for p in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, UserError])
@pytest.mark.parametrize("existing", [False, True])
def test_an_interrupted_write_leaves_what_there_was(tmp_path, error, existing):
    out = tmp_path / "out"
    if existing:
        make(out, "old")
    with pytest.raises(error), whole_folder(out, overwrite=True) as folder:
        make(folder)
        raise error
    assert [p.name for p in tmp_path.iterdir()] == (["out"] if existing else [])
    assert not existing or (out / "config.json").read_text() == "old"


def test_an_interruption_between_the_renames_gives_back_the_old(tmp_path, monkeypatch):
    out = tmp_path / "out"
    make(out, "old")
    rename = os.rename

    def interrupted(src, dst):
        if src.name == "new":
            monkeypatch.undo()
            raise KeyboardInterrupt
        rename(src, dst)

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), whole_folder(out, overwrite=True) as folder:
        make(folder)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (out / "config.json").read_text() == "old"


def test_neighbours_are_left_alone(tmp_path):
    """Also those named as backups are."""
    for name in ("out", "out.old", "out.new", "out.bak"):
        make(tmp_path / name, name)
    with whole_folder(tmp_path / "out", overwrite=True) as folder:
        make(folder)
    found = {p.name: (p / "config.json").read_text() for p in tmp_path.iterdir()}
    assert found == {"out": "new", "out.old": "out.old", "out.new": "out.new", "out.bak": "out.bak"}


def test_an_existing_folder_is_replaced_only_when_asked(tmp_path):
    make(tmp_path / "out", "old")
    with (
        pytest.raises(UserError, match="exists; choose another"),
        whole_folder(tmp_path / "out", overwrite=False) as folder,
    ):
        make(folder)
    # A run that was killed left this behind.
    make(tmp_path / "out.partial", "half")
    with whole_folder(tmp_path / "out", overwrite=True) as folder:
        make(folder)
    assert (tmp_path / "out" / "config.json").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_only_a_model_folder_is_replaced(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("")
    (tmp_path / "file").write_text("")
    make(tmp_path / "model")
    (tmp_path / "link").symlink_to(tmp_path / "model")
    for name in ("home", "file", "link"):
        with (
            pytest.raises(UserError, match="is not a model folder"),
            whole_folder(tmp_path / name, overwrite=True) as folder,
        ):
            make(folder)
    with (
        pytest.raises(UserError, match="holds the model to convert"),
        whole_folder(tmp_path / "model", overwrite=True, source=tmp_path / "model") as folder,
    ):
        make(folder)
    assert (tmp_path / "home" / "thesis.txt").exists()


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match="cannot write"),
        whole_folder(tmp_path / "file" / "out", overwrite=False) as folder,
    ):
        make(folder)


def test_info_round_trips(tmp_path, tiny):
    write_info(tmp_path / "ai_jax.json", tiny, {"seed": 3})
    assert read_info(tmp_path / "ai_jax.json") == (tiny, {"seed": 3})
    for text in ("[1]", "{", "3"):
        (tmp_path / "ai_jax.json").write_text(text)
        with pytest.raises(UserError, match="not a readable JSON mapping"):
            read_info(tmp_path / "ai_jax.json")
