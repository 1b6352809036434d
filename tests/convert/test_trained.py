"""From a published checkpoint through training and back: what training left alone is untouched."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from tiny_run import LABELS, planner, tiny_config, write_tokenizer

from ai_jax.config import to_dict
from ai_jax.convert import shards
from ai_jax.convert.from_hf import from_hf
from ai_jax.convert.load import load
from ai_jax.convert.to_hf import to_hf
from ai_jax.errors import UserError
from ai_jax.train.loop import train
from ai_jax.train.stages import StageConfig

TRAINED = "thinker.audio_tower.proj."


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny):
    """A full model's folder, its checkpoint, a run that trains ``proj`` alone, and its export."""
    from tiny_folder import Source

    tmp = tmp_path_factory.mktemp("trained")
    src = Source(tmp / "published", tiny, full=True)
    scale = {name: 0.05 * t.astype(np.float32) for name, t in src.tensors.items()}
    src.tensors = {name: scale[name].astype(t.dtype) for name, t in src.tensors.items()}
    src.info = to_dict(tiny)
    names = list(src.tensors)
    published = src.save(shards=[names[::2], names[1::2]])
    write_tokenizer(published / "tokenizer.json")
    from_hf(published, tmp / "checkpoint")
    stage = StageConfig(name="proj", steps=2, learning_rate=1e-2, trainable=("audio_tower.proj.*",))
    config = tiny_config(
        tmp / "unused", init=str(tmp / "checkpoint"), tokenizer=None, stages=(stage,), eval_every=0
    )
    train(config, tmp / "run", export=tmp / "exported", planner=planner, labels=LABELS)
    return published, tmp / "checkpoint", tmp / "run", tmp / "exported"


def assert_only_proj_moved(published, out):
    before, after = shards.open_folder(published), shards.open_folder(out)
    assert list(before) == list(after)
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype
        same = tensor.tobytes() == before[name].tobytes()
        assert same != name.startswith(TRAINED), name
    assert shards.Layout.of(out) == shards.Layout.of(published)
    for name in ("LICENSE", "chat_template.jinja"):
        assert (out / name).read_bytes() == (published / name).read_bytes()


def test_training_changes_what_it_trained_and_nothing_else(trained, tmp_path):
    published, checkpoint, run, exported = trained
    to_hf(run, tmp_path / "out")
    for out in (tmp_path / "out", exported):
        assert_only_proj_moved(published, out)
    moved = shards.open_folder(tmp_path / "out")[f"{TRAINED}weight"]
    want = load(run).params["audio_tower.proj.weight"].astype(ml_dtypes.bfloat16)
    assert np.array_equal(moved, want)
    facts = json.loads((tmp_path / "out" / "ai_jax.json").read_text())["provenance"]
    assert facts["base"] == facts["init"] == checkpoint.name, "a name, not a place on this machine"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| stages | proj 2 |" in card and "| training step | 2 |" in card
    assert "| silent | 300 |" in card
    for text in (card, (exported / "README.md").read_text()):
        assert checkpoint.name in text and str(checkpoint.parent) not in text


def test_a_base_that_moved_is_asked_for(trained, tmp_path):
    published, checkpoint, run, _ = trained
    run = shutil.copytree(run, tmp_path / "run")
    info = json.loads((run / "ai_jax.json").read_text())
    info["provenance"]["base"] = str(tmp_path / "gone")
    (run / "ai_jax.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match="--base"):
        to_hf(run, tmp_path / "out")
    for base in (checkpoint, published):
        to_hf(run, tmp_path / "out", base=base, overwrite=True)
        assert_only_proj_moved(published, tmp_path / "out")


def test_a_base_of_another_size_is_refused(trained, tmp_path, tiny, source):
    import dataclasses

    text = dataclasses.replace(tiny.text, num_hidden_layers=tiny.text.num_hidden_layers + 1)
    other = source("other", dataclasses.replace(tiny, text=text)).save()
    with pytest.raises(UserError, match="another size"):
        to_hf(trained[2], tmp_path / "out", base=other)
    assert not (tmp_path / "out").exists()
