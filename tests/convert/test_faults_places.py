"""Faults of places and of checkpoints: each is one sentence, and all is afterwards as it was.

Also: links that are no fault, and comparing a folder with a release of the same weights.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
from orbax.checkpoint import v1 as ocp
from refusal import ai_jax, assert_one_sentence, tree
from release_double import Release
from tiny_folder import Source

from ai_jax.convert import hf, shards
from ai_jax.convert.from_hf import from_hf
from ai_jax.convert.open import open_source

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory, tiny):
    """A full model in two shards, and its checkpoint."""
    tmp = tmp_path_factory.mktemp("sound")
    src = Source(tmp / "model", tiny, full=True)
    names = list(src.tensors)
    folder = src.save(shards=[names[::2], names[1::2]])
    from_hf(folder, tmp / "checkpoint")
    return tmp


@pytest.fixture
def places(sound, tmp_path):
    """``model`` and ``checkpoint`` in a folder of their own."""
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def call(monkeypatch, capsys):
    return lambda *args: ai_jax(monkeypatch, capsys, "convert", *args)


@pytest.fixture
def refused(call, tmp_path):
    """Run ``ai-jax convert ARGS`` in vain; its sentence has the parts ``says`` in this order."""

    def refused(*args, says):
        before = tree(tmp_path)
        result = call(*args)
        assert_one_sentence(*result, *says)
        assert tree(tmp_path) == before

    return refused


@pytest.fixture
def done(call):
    """Run ``ai-jax convert ARGS``, which must succeed in silence on stderr: what it prints."""

    def done(*args):
        code, out, err = call(*args)
        assert (code, err) == (0, ""), err
        return out

    return done


# Sources and targets.


@pytest.mark.parametrize("command", ["from-hf", "to-hf", "from-release", "to-release", "inspect"])
def test_a_source_that_is_none(refused, tmp_path, command):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    out = [] if command == "inspect" else [tmp_path / "out"]
    for name in ("empty", "file", "nowhere"):
        refused(command, tmp_path / name, *out, says=[name, "; "])


@pytest.mark.parametrize("command, name", [("from-hf", "model"), ("to-hf", "checkpoint")])
def test_a_target_that_must_not_be_written(refused, places, command, name):
    source = places / name
    (places / "home").mkdir()
    (places / "home" / "thesis").write_text("x")
    (places / "file").write_text("x")
    (places / "link").symlink_to(source)
    (places / "above").mkdir()
    inside = shutil.move(shutil.copytree(source, places / "inner"), places / "above" / "inner")
    (places / "above" / "config.json").write_text("{}")
    exists = ["exists", "choose another folder or pass --overwrite"]
    for name in ("home", "file", "link", "model", "checkpoint", "above"):
        refused(command, source, places / name, says=[name, *exists])
    no_model = ["is not a model folder", "choose another"]
    for name in ("home", "file"):
        refused(command, source, places / name, "--overwrite", says=[name, *no_model])
    holds = ["holds the model to convert", "choose another folder"]
    for name in (source.name, "link"):
        refused(command, source, places / name, "--overwrite", says=[name, *holds])
    refused(command, inside, places / "above", "--overwrite", says=["above", *holds])
    for out in (source / "out", source / "deep" / "out", places / "link" / "out"):
        says = [str(out), "lies inside", "choose a folder outside"]
        refused(command, source, out, says=says)


def test_an_existing_model_is_replaced_when_asked(done, places):
    before = tree(places / "model")
    done("from-hf", places / "model", places / "checkpoint", "--overwrite", "--skip", "vision")
    assert tree(places / "model") == before
    assert {p.name for p in places.iterdir()} == {"model", "checkpoint"}
    assert not any(name.startswith("visual.") for name in open_source(places / "checkpoint").specs)


# Links, as the cache of the Hugging Face hub has them.


def to_links(folder, hub):
    """Move a folder into a cache: in its place are links to files named by their hashes."""
    blobs = hub / "blobs"
    blobs.mkdir(parents=True)
    snapshot = hub / "snapshots" / folder.name
    for i, path in enumerate(sorted(p for p in folder.rglob("*") if p.is_file())):
        link = snapshot / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, blobs / f"{i:064x}")
        link.symlink_to(os.path.relpath(blobs / f"{i:064x}", link.parent))
    return snapshot


@pytest.fixture
def cached(places):
    return to_links(places / "model", places / "hub")


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def test_links_become_files(cached, places, done):
    before = tree(places / "hub")
    done("from-hf", cached, places / "out")
    done("to-hf", places / "out", places / "back")
    done("to-hf", cached, places / "direct")
    assert tree(places / "hub") == before
    shutil.rmtree(places / "hub")
    for name in ("out", "back", "direct"):
        assert not any(path.is_symlink() for path in (places / name).rglob("*"))
    done("to-hf", places / "out", places / "again")
    for name in ("back", "direct", "again"):
        got = contents(places / name)
        del got["ai_jax.json"]
        assert got == contents(places / "model")


def test_links_of_a_release_become_files(tmp_path, tiny, done):
    release = Release(tmp_path / "release", tiny).save(tower="safetensors")
    done("from-release", to_links(release, tmp_path / "hub"), tmp_path / "linked")
    done("from-release", release, tmp_path / "plain")
    assert tree(tmp_path / "linked") == tree(tmp_path / "plain")


def test_a_source_that_is_a_link(places, done):
    (places / "link").symlink_to("model")
    done("from-hf", places / "link", places / "out")
    params = "params/d/values"
    got, want = (places / name / params for name in ("out", "checkpoint"))
    assert got.read_bytes() == want.read_bytes()


@pytest.mark.parametrize(
    "name",
    ["model-00002-of-00002.safetensors", shards.INDEX, "config.json", "LICENSE", "ai_jax.json"],
)
@pytest.mark.parametrize("command", ["from-hf", "to-hf", "inspect"])
def test_a_link_that_leads_nowhere(cached, places, refused, command, name):
    (cached / name).unlink(missing_ok=True)
    (cached / name).symlink_to("../../blobs/gone")
    says = [f"{name} is a link to ../../blobs/gone", "not there", "download it again"]
    out = [] if command == "inspect" else [places / "out"]
    refused(command, cached, *out, says=says)


def test_the_only_weights_are_a_link_that_leads_nowhere(cached, places, refused):
    for path in [*cached.glob("*.safetensors"), cached / shards.INDEX]:
        path.unlink()
    (cached / shards.SINGLE).symlink_to("../../blobs/gone")
    says = [shards.SINGLE, "../../blobs/gone", "not there", "download it again"]
    refused("from-hf", cached, places / "out", says=says)


# Checkpoints.


def rename_array(checkpoint):
    """Have Orbax's description name an array that is not there."""
    path = checkpoint / "params" / "_METADATA"
    path.write_text(path.read_text().replace(NORM, "model.norm.gone"))


def put_metadata(checkpoint, what):
    path = checkpoint / "_CHECKPOINT_METADATA"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"custom_metadata": what}))


def cut(path, size):
    os.truncate(path, size % path.stat().st_size)


DAMAGED = {
    "no arrays": lambda c: (c / "params" / "d" / "values").unlink(),
    "arrays are cut off": lambda c: cut(c / "params" / "d" / "values", -1),
    "half of the arrays": lambda c: cut(c / "params" / "d" / "values", 100_000),
    "the database is not finished": lambda c: (c / "params" / "manifest.ocdbt").unlink(),
    "the database's manifest is cut off": lambda c: cut(c / "params" / "manifest.ocdbt", 40),
    "an array is missing": rename_array,
    "no description of the arrays": lambda c: (c / "params" / "_METADATA").unlink(),
    "the description is cut off": lambda c: cut(c / "params" / "_METADATA", 500),
    "the description is another": lambda c: (c / "params" / "_METADATA").write_text("[]"),
    "the marker is no JSON": lambda c: (c / "_CHECKPOINT_METADATA").write_text("{"),
    "no marker": lambda c: (c / "_CHECKPOINT_METADATA").unlink(),
    "the marker's notes are another": lambda c: put_metadata(c, ["form"]),
    "no params": lambda c: shutil.rmtree(c / "params"),
    "no carried": lambda c: shutil.rmtree(c / "carried"),
    "carried is cut off": lambda c: cut(c / "carried" / "d" / "values", 500),
    "no files": lambda c: shutil.rmtree(c / "hf"),
    "no config.json": lambda c: (c / "hf" / "config.json").unlink(),
    "a damaged config.json": lambda c: cut(c / "hf" / "config.json", 99),
    "no layout": lambda c: shutil.rmtree(c / "layout"),
    "a layout's file is cut off": lambda c: cut(next((c / "layout").glob("*.safetensors")), 100),
}


@pytest.mark.parametrize("fault", DAMAGED)
def test_a_damaged_checkpoint(places, refused, fault):
    checkpoint = places / "checkpoint"
    DAMAGED[fault](checkpoint)
    refused("to-hf", checkpoint, places / "out", says=[str(checkpoint), "again"])


def test_a_checkpoint_that_was_never_finished(places, refused):
    """As Orbax leaves it when it is killed, and the run around it."""
    half = shutil.move(places / "checkpoint", places / "7.orbax-checkpoint-tmp-3")
    refused("to-hf", half, places / "out", says=[half.name, "never finished", "again"])
    (places / "run").mkdir()
    shutil.copy(half / "ai_jax.json", places / "run")
    (half / "params" / "_METADATA").unlink()
    for name in (half.name, "7"):
        step = shutil.move(half, places / "run" / name)
        (step / "_CHECKPOINT_METADATA").unlink(missing_ok=True)
        says = ["run is a training run", f"{name} is half written", "go on with the training"]
        refused("to-hf", places / "run", places / "out", says=says)
        half = step


def test_a_process_says_no_more_than_that(places):
    """The libraries below would print pages about damage, from threads of their own."""
    checkpoint = places / "checkpoint"
    cut(checkpoint / "params" / "d" / "values", 100_000)
    before = tree(places)
    done = subprocess.run(
        [sys.executable, "-m", "ai_jax.cli", "convert", "to-hf", checkpoint, places / "out"],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    says = [str(checkpoint), "is damaged", "Convert or copy it again"]
    assert_one_sentence(done.returncode, done.stdout, done.stderr, *says)
    assert tree(places) == before


def test_a_checkpoint_without_one_array(places, refused):
    """As another program may save it: what it describes is all there, but not all of the model."""
    params = dict(ocp.load_checkpointables(places / "checkpoint", {"params": None})["params"])
    del params[NORM]
    ocp.save_checkpointables(places / "other", {"params": params})
    shutil.copy(places / "checkpoint" / "ai_jax.json", places / "other")
    refused("to-hf", places / "other", places / "out", says=[f"'{NORM}' is missing", "again"])
    (places / "other" / "ai_jax.json").unlink()
    says = ["other has no ai_jax.json", "copy it again"]
    refused("to-hf", places / "other", places / "out", says=says)


def test_arrays_that_are_described_but_gone(places, refused):
    """As a copy broken off leaves them: Orbax keeps what is larger than a line in other files."""
    params = ocp.load_checkpointables(places / "checkpoint", {"params": None})["params"]
    ocp.save_checkpointables(places / "other", {"params": params})
    shutil.copy(places / "checkpoint" / "ai_jax.json", places / "other")
    values = [p for p in (places / "other" / "params").glob("*/d/*") if p.is_file()]
    max(values, key=lambda p: p.stat().st_size).unlink()
    refused("to-hf", places / "other", places / "out", says=["other", "onvert or copy", "again"])


def test_a_checkpoint_is_not_a_folder_of_hugging_face(places, refused):
    says = ["checkpoint is a checkpoint already", "give a folder", "use to-hf"]
    refused("from-hf", places / "checkpoint", places / "out", says=says)


@pytest.mark.parametrize("skip", [(), ("--skip", "vision")], ids=["whole", "skipped"])
def test_a_header_that_is_gone(places, done, refused, skip):
    """Its file would come back with a header of ours."""
    done("from-hf", places / "model", places / "other", *skip)
    done("to-hf", places / "other", places / "back")
    sorted((places / "other" / "layout").glob("*.safetensors"))[-1].unlink()
    says = ["other is damaged: no header in its folder layout has the tensor", "again"]
    refused("to-hf", places / "other", places / "out", says=says)


# The base of what was trained.


def save_run(run, checkpoint, base):
    """A training run's step 3 with the model of ``checkpoint``, started from ``base``."""
    params = ocp.load_checkpointables(checkpoint, {"params": None})["params"]
    ocp.save_checkpointables(run / "3", {"params": params})
    info = json.loads((checkpoint / "ai_jax.json").read_text())
    info["provenance"] = {"base": str(base)}
    (run / "ai_jax.json").write_text(json.dumps(info))


def test_a_run_from_a_run_has_its_base(places, done):
    save_run(places / "first", places / "checkpoint", places / "model")
    save_run(places / "second", places / "checkpoint", places / "first")
    done("to-hf", places / "second", places / "out")
    before, after = (shards.open_folder(places / name) for name in ("model", "out"))
    assert before.keys() == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    # The talker's weights come from the first base, as if it had been given.
    done("to-hf", places / "second", places / "given", "--base", places / "model")
    assert tree(places / "given") == tree(places / "out")


def test_a_base_that_cannot_be_opened(places, refused):
    base, run = places / "base", places / "run"
    save_run(run, places / "checkpoint", base)
    says = ["run/3 was trained from", "base, which is not there", "give its place with --base"]
    refused("to-hf", run, places / "out", says=says)
    base.mkdir()
    says = ["base is not a model", "run/3 was trained from it", "--base DIR gives another place"]
    refused("to-hf", run, places / "out", says=says)
    shutil.copytree(places / "model", base, dirs_exist_ok=True)
    (base / "model-00002-of-00002.safetensors").unlink()
    says = ["base: the shard model-00002", "is missing", "--base DIR gives another place"]
    refused("to-hf", run, places / "out", says=says)


def test_a_base_that_never_was_a_folder_of_hugging_face(tmp_path, tiny, done, refused):
    """It gives no form: the result is a folder of its own, unless that base was asked for."""
    release = Release(tmp_path / "release", tiny).save(tower="safetensors")
    base, run, out = (tmp_path / name for name in ("base", "run", "out"))
    done("from-release", release, base)
    for recorded in (base, release):
        save_run(run, base, recorded)
        done("to-hf", run, out)
        assert set(open_source(out).carried) == set(hf.NO_VISION_SHAPES)
        shutil.rmtree(out)
        says = [f"{recorded} has no config.json", "give a Hugging Face folder", "leave --base out"]
        refused("to-hf", run, out, "--base", recorded, says=says)
        shutil.rmtree(run)


# A folder beside a release of the same weights.


def test_verify_compares_with_a_release(tmp_path, tiny, call, done):
    theirs = Release(tmp_path / "release", tiny)
    done("to-hf", theirs.save(tower="safetensors"), tmp_path / "model")
    compare = ("verify", tmp_path / "model", theirs.folder, "--weights-only")
    assert done(*compare).splitlines()[-1] == "same"

    changes = (
        # Their name -> ours; of queries, keys and values, which are one there, the queries.
        ("transformer.h.1.mlp.fc_1.weight", "model.layers.1.mlp.gate_proj.weight"),
        ("transformer.h.2.attn.qkv.bias", "model.layers.2.self_attn.q_proj.bias"),
        ("layers.0.fc1.weight", "audio_tower.layers.0.fc1.weight"),
    )
    for name, ours in changes:
        state = theirs.decoder if name in theirs.decoder else theirs.tower
        sound = state[name]
        state[name] = sound.copy()
        state[name].reshape(-1)[5] += 0.25
        shutil.rmtree(theirs.folder)
        theirs.save(tower="safetensors")
        code, out, err = call(*compare)
        assert (code, err, out.split()[-1]) == (1, "", "different")
        assert "1 of" in out and f"'{ours}'" in " ".join(out.split())
        state[name] = sound
