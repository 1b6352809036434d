"""Drills with real processes: kills at any moment, disks that fill up, little memory."""

import collections
import dataclasses
import itertools
import random
import shutil
import subprocess
import time
from collections import namedtuple

import drill
import pytest
from tiny_folder import Source

from ai_jax.config import ModelConfig, preset
from ai_jax.convert import files
from ai_jax.convert.synthetic import VISION, write_random_folder
from ai_jax.errors import UserError

KILLS = 10  # each way, and as many again where a model is replaced
Case = namedtuple("Case", "step source inside old new old_folder")


@pytest.fixture(scope="module")
def cases(tmp_path_factory, tiny):
    """For each direction: a source, what it becomes, and the result of another one."""
    place = tmp_path_factory.mktemp("models")
    src = Source(place / "new hf", tiny, full=True).save()
    other = Source(place / "old hf", tiny, dtype="float32").save()
    for of, folder in (("new", src), ("old", other)):
        drill.STEPS["from-hf"](folder, place / f"{of} from-hf")
        drill.STEPS["to-hf"](place / f"{of} from-hf", place / f"{of} to-hf")
    return {
        step: Case(
            step,
            source,
            drill.contents(source),
            *(drill.contents(place / f"{of} {step}") for of in ("old", "new")),
            place / f"old {step}",
        )
        for step, source in (("from-hf", src), ("to-hf", place / "new from-hf"))
    }


@pytest.fixture(params=["from-hf", "to-hf"])
def case(request, cases):
    case = cases[request.param]
    yield case
    assert drill.contents(case.source) == case.inside


@pytest.fixture(params=[False, True], ids=["new", "overwrite"])
def existing(request):
    return request.param


class Target:
    """Where to convert to, with a model to be replaced if ``existing``."""

    def __init__(self, case, folder, existing):
        self.case, self.existing = case, existing
        self.out, self.partial = folder / "out", folder / "out.partial"
        self.before = case.old if existing else None
        self.args = case.step, case.source, self.out, existing
        self.reset()

    def reset(self):
        """As before the first run, but for what killed ones left behind."""
        if self.out.exists():
            shutil.rmtree(self.out)
        if self.existing:
            shutil.copytree(self.case.old_folder, self.out)

    def assert_old_or_new(self):
        """Rerunning without being allowed to replace gives back what was about to be replaced."""
        if self.existing and not self.out.exists():
            with pytest.raises(UserError, match="exists"):
                drill.STEPS[self.case.step](self.case.source, self.out)
        got = drill.contents(self.out)
        assert got in (self.before, self.case.new)
        if got != self.before:
            self.reset()

    def assert_untouched(self):
        assert drill.contents(self.out) == self.before
        assert sorted(self.out.parent.iterdir()) == [self.out] * self.existing

    def assert_rerun_succeeds(self):
        drill.STEPS[self.case.step](self.case.source, self.out, overwrite=self.existing)
        assert drill.contents(self.out) == self.case.new
        assert list(self.out.parent.iterdir()) == [self.out]


def test_a_kill_at_any_moment_leaves_old_or_new(tmp_path, case, existing):
    """Moments all over the time that whole runs take; each run finds what the last one left."""
    target = Target(case, tmp_path, existing)
    seconds = min(drill.Run(drill.convert, *target.args[:3], True).result() for _ in range(2))
    target.reset()
    rng = random.Random(f"{case.step} {existing}")
    kills = halfway = 0
    while kills < KILLS:
        run = drill.Run(drill.convert, *target.args)
        moment = (kills + rng.random()) / KILLS * seconds
        time.sleep(moment)
        if run.kill():
            kills += 1
            halfway += target.partial.exists()
        else:
            seconds = moment  # this one was faster
        target.assert_old_or_new()
    assert halfway
    target.assert_rerun_succeeds()


def test_a_kill_at_each_rename_leaves_old_or_new(tmp_path, case, existing):
    """The moments that chance misses: around the renames that put the new in the old's place."""
    target = Target(case, tmp_path, existing)
    states = set()
    for n in itertools.count():
        run = drill.Run(drill.die, *target.args, n)
        if run.end() == 0:
            break
        inside = target.partial.is_dir() and {p.name for p in target.partial.iterdir()}
        states.add((target.out.exists(), frozenset(inside or ())))
        target.assert_old_or_new()
    assert (existing, frozenset({"new"})) in states
    assert not existing or (False, frozenset({"new", "old"})) in states
    target.reset()
    target.assert_rerun_succeeds()


def assert_refused(target, run, reason):
    code, err = run.result()
    assert code == 2, err
    assert err.startswith("ai-jax: error: ") and err.count("\n") == 1, err
    assert str(target.out) in err and reason in err, err
    target.assert_untouched()


def test_a_file_that_cannot_grow_is_one_sentence(tmp_path, case, existing):
    """The limit strikes at once, or anywhere in the weights."""
    target = Target(case, tmp_path, existing)
    rng = random.Random(f"{case.step} {existing}")
    largest = max(map(len, case.new.values()))
    for least, unforeseen in ((0.0, False), (0.4, True), (0.7, True)):
        limit = int(largest * (least + 0.3 * rng.random()))
        run = drill.Run(drill.command, *target.args, largest_file=limit, unforeseen=unforeseen)
        assert_refused(target, run, "File too large")
    target.assert_rerun_succeeds()


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 8 MB: yields a folder on it, and how to leave only so many bytes free."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a disk is not allowed here")

    def leave(free):
        (place / "ballast").write_bytes(b"")
        (place / "ballast").write_bytes(bytes(shutil.disk_usage(place).free - free))

    (place / "models").mkdir()
    yield place / "models", leave
    subprocess.run(["umount", place], check=True)


def test_a_full_disk_is_one_sentence(small_disk, case, existing):
    """Whether it is too small from the start or somebody else fills it meanwhile."""
    folder, leave = small_disk
    target = Target(case, folder, existing)
    rng = random.Random(f"{case.step} {existing}")
    weights = max(map(len, case.new.values()))
    for least in (0.7, 0.85):
        leave(int(weights * (least + 0.15 * rng.random())))
        run = drill.Run(drill.command, *target.args, unforeseen=True)
        assert_refused(target, run, "No space left on device")
    run = drill.Run(drill.command, *target.args)
    assert_refused(target, run, "there is no room for")
    leave(1 << 21)
    target.assert_rerun_succeeds()


def test_room_is_looked_for_first(tmp_path, case, existing, monkeypatch):
    target = Target(case, tmp_path, existing)
    usage = shutil.disk_usage(tmp_path)._replace(free=10_000)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=f"there is no room for {target.out}: it takes"):
        drill.convert(*target.args)
    target.assert_untouched()


@pytest.fixture(scope="module")
def small_and_tiny(tmp_path_factory):
    """3B with a tenth of its width and less (200 MB), and with hardly any: folder -> bytes.

    Both have its number of tensors, and the first also its proportions: the largest tensor is as
    large a part of the whole.
    """
    full, tiny = (preset("model", name, ModelConfig) for name in ("qwen2_5_omni_3b", "tiny"))
    place = tmp_path_factory.mktemp("sizes")
    sizes = {}
    for name, width, vocab in (("small", 9, 20_480), ("tiny", 1, 320)):
        config = dataclasses.replace(
            full,
            audio=dataclasses.replace(
                full.audio, d_model=20 * width, encoder_ffn_dim=80 * width, output_dim=32 * width
            ),
            text=dataclasses.replace(
                full.text,
                vocab_size=vocab,
                hidden_size=32 * width,
                intermediate_size=172 * width,
                head_dim=2 * width,
            ),
            stream=tiny.stream,
        )
        vision = VISION | {"hidden_size": 20 * width, "intermediate_size": 53 * width}
        written = write_random_folder(config, place / name, vision=vision, shard_bytes=100_000_000)
        sizes[place / name] = written.bytes
    return sizes


def test_memory_is_that_of_3b_in_proportion(tmp_path, small_and_tiny):
    """3B's 9.4 GB are converted in 2 GB; 200 MB in 43 MB are the same ratio.

    What a conversion lets itself hold (a block of a tensor, what it reads ahead) shrinks with the
    model, and so does the largest tensor, which to-hf holds: at either size, memory is the same
    part of the whole. What does not shrink is memory per process and per tensor: libraries that
    are loaded on first use, threads, Orbax's description of 1,442 tensors. So that is measured, as
    what a model takes that has as many tensors and hardly any bytes, and is not counted.
    """
    growth = collections.Counter()
    scale = max(small_and_tiny.values()) / 9.4e9
    for src, sign in zip(small_and_tiny, (1, -1), strict=True):
        there = tmp_path / f"{src.name} there"
        for step, in_place in (("from-hf", True), ("to-hf", True), ("to-hf", False)):
            a, b = (src, there) if step == "from-hf" else (there, tmp_path / src.name)
            peak = drill.Run(drill.memory, step, a, b, scale, in_place).result()
            growth[step, in_place] += sign * peak
            if step == "to-hf":
                (b / files.INFO).unlink()
                assert drill.contents(b) == drill.contents(src)
                shutil.rmtree(b)
        run = drill.Run(drill.memory, "to-hf", there, b, scale, True, dtype="float16")
        growth["cast"] += sign * run.result()
    assert max(growth.values()) <= 2e9 * scale, growth
