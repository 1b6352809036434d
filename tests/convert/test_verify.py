"""verify: every difference is found, named and answered by the exit code."""

import dataclasses
import json
import weakref

import ml_dtypes
import numpy as np
import pytest
from rich.console import Console

from ai_jax.config import to_dict
from ai_jax.convert import behaviour, runners, to_orbax, verify
from ai_jax.convert.behaviour import Behaviour, ClipDiff, GreedyDiff
from ai_jax.convert.compare import compare, difference
from ai_jax.convert.hf_folder import write_model_folder
from ai_jax.convert.open import open_source
from ai_jax.errors import UserError

FC1 = "audio_tower.layers.1.fc1.weight"


@pytest.fixture
def twins(tmp_path, source):
    """Two folders of one model with sane weights: change the second, then ``save`` it."""
    a, b = source("a", dtype="float32"), source("b", dtype="float32")
    for src in (a, b):
        for name, tensor in src.tensors.items():
            src.tensors[name] = tensor * np.float32(0.3)
    a.save()
    return a, b


def weights_only(a, b, **kwargs):
    return verify.verify(a, b, run=False, **kwargs)


def group(report, name):
    return next(g for g in report.groups if g.group == name)


def printed(report):
    console = Console(width=200)
    with console.capture() as capture:
        console.print(verify.table(report))
    return capture.get()


# Weights.


def test_a_checkpoint_of_a_folder_is_the_same(tmp_path, source):
    src = source(full=True)
    names = list(src.tensors)
    folder = src.save(shards=[names[::2], names[1::2]])
    to_orbax.write(open_source(folder), tmp_path / "checkpoint")
    report = weights_only(folder, tmp_path / "checkpoint")
    assert report.verdict == "same" and report.exit_code == 0 and not report.reasons
    assert sum(g.equal for g in report.groups) == len(names)
    assert sum(g.bytes for g in report.groups) == sum(t.nbytes for t in src.tensors.values())
    assert printed(report).rstrip().endswith("same")


def test_one_bit_is_found_and_its_tensor_named(twins):
    a, b = twins
    b.tensors[FC1].view(np.uint32)[3, 4] ^= 1
    report = weights_only(a.folder, b.save())
    assert report.verdict == "different" and report.exit_code == 1
    audio = group(report, "audio layers")
    assert audio.tensors - audio.equal == 1 and audio.worst == FC1
    x, y = a.tensors[FC1][3, 4], b.tensors[FC1][3, 4]
    assert audio.max_abs_diff == abs(float(x) - float(y)) > 0
    assert audio.max_rel_diff == pytest.approx(audio.max_abs_diff / np.abs(a.tensors[FC1]).max())
    assert all(g.equal == g.tensors for g in report.groups if g is not audio)
    assert FC1 in printed(report)


def test_tensors_that_only_one_has(source):
    a, b = source("a", full=True), source("b", full=True)
    del b.tensors["talker.model.norm.weight"]
    a.save(), b.save()
    for first, second in [(a, b), (b, a)]:
        report = weights_only(first.folder, second.folder)
        assert report.exit_code == 1
        assert any("talker.model.norm.weight" in reason for reason in report.reasons)
    assert group(report, "talker").only_b == ("talker.model.norm.weight",)
    assert group(report, "talker").tensors == 0


def test_parts_that_the_conversion_left_out_are_excused(tmp_path, source):
    folder = source(full=True).save()
    to_orbax.write(open_source(folder), tmp_path / "slim", skip=["talker"])
    for a, b in [(folder, tmp_path / "slim"), (tmp_path / "slim", folder)]:
        report = weights_only(a, b)
        assert report.verdict == "same" and report.exit_code == 0
        assert any("leaves out 'talker." in note for note in report.notes)
    # Only those that were left out on purpose.
    opened = open_source(tmp_path / "slim")
    specs = {name: spec for name, spec in opened.specs.items() if not name.startswith("visual.")}
    report = weights_only(folder, dataclasses.replace(opened, specs=specs))
    assert report.exit_code == 1 and "visual." in report.reasons[0]


def test_a_run_and_its_export_are_the_same(tmp_path, tiny, source):
    """A run saves what the model runs; a folder of its own gets a vision tower without layers."""
    run = dataclasses.replace(open_source(source(dtype="float32").save()), step=7)
    run = dataclasses.replace(run, specs={name: run.specs[name] for name in run.params})
    params = dict(run.fetch(list(run.params)))
    out = tmp_path / "export"
    write_model_folder(run.config, params, out, None, {}, dtype=np.float32)
    report = weights_only(run, out)
    assert report.verdict == "same" and report.a.step == 7
    assert any("stand-ins" in note for note in report.notes)
    # Beside an export in the form of its base, which has the towers that do not run.
    folder = source("base", dtype="float32", full=True).save()
    report = weights_only(run, folder)
    assert report.verdict == "same" and any("leaves out" in note for note in report.notes)
    assert weights_only(dataclasses.replace(run, step=None), folder).exit_code == 1


def test_another_dtype_differs_unless_it_is_accepted(tmp_path, source):
    folder = source(dtype="float32").save()
    to_orbax.write(open_source(folder), tmp_path / "half", dtype="bfloat16")
    report = weights_only(folder, tmp_path / "half")
    assert report.exit_code == 1
    assert group(report, "embedding").dtypes == {"float32 -> bfloat16": 1}
    assert group(report, "embedding").equal == 0
    assert "float32 -> bfloat16" in printed(report)
    # bfloat16 has 8 bits of precision, so a rounding is at most 2^-8 of the value.
    assert 2**-12 < group(report, "embedding").max_rel_diff <= 2**-8
    assert weights_only(folder, tmp_path / "half", tolerance=1e-4).exit_code == 1
    report = weights_only(folder, tmp_path / "half", tolerance=2**-8)
    assert report.exit_code == 0 and report.verdict == "within tolerance"


def test_other_shapes_and_configs_differ(source, tiny):
    text = dataclasses.replace(tiny.text, intermediate_size=64, rope_theta=1e4)
    a, b = source("a"), source("b", config=dataclasses.replace(tiny, text=text))
    report = weights_only(a.save(), b.save())
    assert len(group(report, "decoder layers").reshaped) == 3 * text.num_hidden_layers
    assert report.config["text.rope_theta"] == (1e6, 1e4)
    assert any("text.rope_theta" in reason for reason in report.reasons)
    assert report.exit_code == 1


def test_names_and_limits_of_serving_are_only_mentioned(source, tiny):
    a, b = source("a"), source("b")
    stream = dataclasses.replace(tiny.stream, threshold=0.25)
    for src, config in [(a, tiny), (b, dataclasses.replace(tiny, name="other", stream=stream))]:
        src.info = to_dict(config)
    report = weights_only(a.save(), b.save())
    assert report.config == {"stream.threshold": (0.5, 0.25)}
    assert report.verdict == "same" and "threshold" in report.notes[0]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "x, y, absolute, relative",
    [
        ([1.0, -4.0], [1.0, -3.0], 1.0, 0.25),
        ([0.0, 2.0], [-0.0, 2.0], 0.0, 0.0),
        ([NAN, 2.0], [NAN, 1.0], 1.0, 0.5),
        ([NAN, 2.0], [1.0, 2.0], INF, INF),
        ([1.0, 2.0], [1.0, NAN], INF, INF),
        ([INF, 2.0], [INF, 1.0], 1.0, 0.5),
        ([INF, 2.0], [-INF, 2.0], INF, INF),
        ([0.0, 0.0], [0.0, 1e-30], 1e-30, INF),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_differences_of_numbers(x, y, absolute, relative, dtype):
    # Over several blocks, and the difference in the last one.
    x, y = (np.concatenate([np.zeros(600_000), v]).astype(dtype) for v in (x, y))
    got = difference(x, y)
    assert not got.equal
    assert got.absolute == pytest.approx(absolute, rel=2**-8)
    assert got.relative == pytest.approx(relative, rel=2**-8)


def test_bits_and_not_values_are_equal():
    nans = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    assert difference(nans, nans.copy()).equal
    assert not difference(nans[:1], nans[1:]).equal
    assert difference(nans[:1], nans[1:]).absolute == 0
    ones = np.ones(3, np.float32)
    assert not difference(ones, ones.astype(ml_dtypes.bfloat16)).equal
    assert difference(np.float32(3), np.float32(3)).equal
    assert difference(np.array([True, False]), np.array([True, True])).absolute == 1


def test_few_tensors_are_in_memory_at_a_time(source):
    opened = open_source(source().save())
    alive: set[str] = set()
    most = 0

    def fetch(names):
        nonlocal most
        for name, tensor in opened.fetch(names):
            copy = tensor.copy()
            alive.add(name)
            weakref.finalize(copy, alive.discard, name)
            most = max(most, len(alive))
            yield name, copy
            del copy

    compare(dataclasses.replace(opened, fetch=fetch), opened)
    assert most == 1


# What cannot be compared.


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"chunks": 0}, "chunks must lie between 1"),
        ({"chunks": 10**6}, "chunks must lie between 1 and 1[0-9]{3} "),
        ({"tolerance": -1.0}, "tolerance"),
        ({"tolerance": float("nan")}, "tolerance"),
        ({"audio": "nowhere.wav"}, "nowhere.wav"),
    ],
)
def test_bad_input_is_refused_before_any_work(source, kwargs, message):
    def refuse(names):
        raise AssertionError("weights were read")

    opened = dataclasses.replace(open_source(source().save()), fetch=refuse)
    with pytest.raises(UserError, match=message):
        verify.verify(opened, opened, **kwargs)


def test_transformers_cannot_run_checkpoints(tmp_path, source, monkeypatch):
    to_orbax.write(open_source(source().save()), tmp_path / "checkpoint")
    path = tmp_path / "checkpoint"
    monkeypatch.setattr(verify, "has_transformers", lambda: True)
    with pytest.raises(UserError, match="neither model"):
        verify.verify(path, path, implementation="transformers")
    monkeypatch.setattr(verify, "has_transformers", lambda: False)
    with pytest.raises(UserError, match="not installed"):
        verify.verify(path, path, implementation="transformers")


def test_who_runs_what(tmp_path, source, monkeypatch):
    folder = open_source(source().save())
    to_orbax.write(folder, tmp_path / "checkpoint")
    checkpoint = open_source(tmp_path / "checkpoint")
    who = verify._implementations
    monkeypatch.setattr(verify, "has_transformers", lambda: True)
    assert who(folder, checkpoint, "auto") == ("transformers", "ours")
    assert who(checkpoint, folder, "auto") == ("ours", "transformers")
    assert who(folder, folder, "auto") == ("transformers", "ours")
    assert who(folder, folder, "transformers") == ("transformers", "transformers")
    assert who(checkpoint, checkpoint, "auto") == who(folder, folder, "ours") == ("ours", "ours")
    monkeypatch.setattr(verify, "has_transformers", lambda: False)
    assert who(folder, checkpoint, "auto") == ("ours", "ours")


# The run.


def test_ours_on_both_sides(twins):
    a, b = twins
    report = verify.verify(a.folder, b.save(), implementation="ours", chunks=3)
    ran = report.behaviour
    assert report.verdict == "same" and (ran.a, ran.b) == ("ours", "ours")
    assert any("not the code" in note for note in report.notes)
    assert [clip.clip for clip in ran.clips] == ["noise", "spoken words"]
    assert all(c.max_abs_diff == c.kl == 0 and c.top1 == 1 for c in ran.clips)
    assert ran.greedy.a == ran.greedy.b and ran.greedy.chunk is None
    assert "greedy over 3 chunks" in printed(report)
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["verdict"] == "same"


def test_another_model_behaves_otherwise(twins):
    a, b = twins
    b.tensors["lm_head.weight"] = b.tensors["lm_head.weight"][::-1].copy()
    b.tensors["model.norm.weight"][0] = np.nan
    report = verify.verify(a.folder, b.save(), implementation="ours", chunks=3)
    assert report.exit_code == 1
    assert all(clip.max_abs_diff == np.inf for clip in report.behaviour.clips)
    assert any("logits differ" in reason for reason in report.reasons)
    assert (
        json.loads(json.dumps(report.to_json(), allow_nan=False))["behaviour"]["clips"][0][
            "max_abs_diff"
        ]
        == "inf"
    )


def test_streams_that_differ_are_not_run(source, tiny):
    a, b = source("a"), source("b")
    mel = dataclasses.replace(tiny.mel, floor=1.0)
    a.info, b.info = to_dict(tiny), to_dict(dataclasses.replace(tiny, mel=mel))
    report = verify.verify(a.save(), b.save(), implementation="ours")
    assert report.behaviour is None and "mel.floor" in report.not_run
    assert report.exit_code == 1 and "mel.floor" in printed(report)


def test_the_recording_is_that_of_the_user(tmp_path, tiny):
    import soundfile

    soundfile.write(tmp_path / "tone.wav", np.sin(np.arange(8000) / 5).astype(np.float32), 16000)
    given = behaviour.material(tiny, tmp_path / "tone.wav", chunks=20, seed=0)
    default = behaviour.material(tiny, None, chunks=20, seed=0)
    assert [clip.name for clip in given.clips] == ["noise", "tone.wav"]
    assert given.mel_cfm.shape == default.mel_cfm.shape == (20, 40, 80)
    np.testing.assert_array_equal(given.clips[0].mel_cfm, default.clips[0].mel_cfm)
    assert np.abs(given.mel_cfm - default.mel_cfm).max() > 0.1
    fmt = tiny.stream.format
    tokens = given.clips[1].tokens
    assert tokens.count(fmt.audio) == 12 * tiny.audio.chunk_tokens
    assert tokens.count(fmt.response) == tokens.count(fmt.eos) == 3
    assert tokens.count(fmt.silent) == 9


class Script:
    """A runner whose logits are told beforehand."""

    def __init__(self, vocab, likeliest):
        self.vocab, self.likeliest, self.reads = vocab, list(likeliest), []

    def read(self, tokens, mel_fm=None):
        self.reads.append((list(tokens), mel_fm is not None))
        logits = np.zeros(self.vocab, np.float32)
        logits[self.likeliest.pop(0)] = 1.5
        return logits


def test_greedy_decoding(tiny):
    fmt, vocab = tiny.stream.format, tiny.text.vocab_size
    chunk = [fmt.audio] * 10
    script = Script(vocab, [fmt.silent, fmt.response, 7, fmt.eos, fmt.response, 8, 9, fmt.silent])
    choices = runners.greedy(script, tiny, np.zeros((4, 40, 80)), reply_tokens=2)
    assert [(c.chunk, c.token) for c in choices] == [
        (0, fmt.silent), (1, fmt.response), (1, 7), (1, fmt.eos),
        (2, fmt.response), (2, 8), (2, 9), (3, fmt.silent),
    ]  # fmt: skip
    assert all(c.margin == 1.5 for c in choices)
    assert script.reads == [
        (chunk, True),
        ([fmt.silent, *chunk], True), ([fmt.response], False), ([7], False),
        ([fmt.eos, *chunk], True), ([fmt.response], False), ([8], False),
        # A reply that is too long is closed.
        ([9, fmt.eos, *chunk], True),
    ]  # fmt: skip
    longest = sum(len(tokens) for tokens, _ in script.reads)
    assert longest <= runners.stream_tokens(tiny, 4, 2)


def test_control_tokens_are_no_text(tiny):
    fmt = tiny.stream.format
    script = Script(tiny.text.vocab_size, [fmt.response, fmt.audio])
    choices = runners.greedy(script, tiny, np.zeros((1, 40, 80)), reply_tokens=1)
    assert choices[1].token not in (fmt.audio, fmt.silent, fmt.response, fmt.pad)


def judge(margin=None, relative=0.0, tolerance=None):
    clip = ClipDiff("noise", 1, relative, relative, 0.0, 1.0)
    greedy = GreedyDiff(9, (1,), (2,), 0, None if margin is None else 4, margin)
    ran = Behaviour("transformers", "ours", (clip,), greedy, 10.0, 0.0, 0.0)
    reasons, notes = [], []
    verify._judge_behaviour(ran, tolerance, reasons, notes)
    return bool(reasons), bool(notes)


def test_what_counts_as_the_same_behaviour():
    assert judge() == (False, False)
    assert judge(relative=1e-5) == (False, False) and judge(relative=1.1e-5) == (True, False)
    assert judge(relative=1.1e-5, tolerance=1e-3) == (False, False)
    # Logits up to 10 that may differ by 1e-5 of that: closer than 2e-4 is a tie.
    assert judge(margin=1e-4) == (False, True) and judge(margin=3e-4) == (True, False)
    assert judge(margin=3e-4, tolerance=1e-3) == (False, True)


def test_first_difference_of_greedy_tokens():
    def choices(*pairs):
        return tuple(runners.Choice(chunk, token, chunk + 0.5) for chunk, token in pairs)

    a = choices((0, 1), (1, 2), (1, 5), (2, 1))
    got = behaviour._greedy_diff(3, a, choices((0, 1), (1, 2), (1, 6), (1, 5), (2, 1)))
    assert (got.equal, got.chunk, got.margin) == (2, 1, 1.5)
    assert got.a == (1, 2, 5, 1) and got.b == (1, 2, 6, 5, 1)
    same = behaviour._greedy_diff(3, a, a)
    assert (same.equal, same.chunk, same.margin) == (4, None, None)


def test_figures_of_a_clip():
    clip = runners.Clip("x", (1, 2), np.zeros((1, 2, 3)))
    a = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]], np.float32))
    b = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]], np.float32)) + 3
    got = behaviour._clip_diff(clip, a, b)
    assert got.kl == pytest.approx(0.25 * np.log(2) / 2, rel=1e-6)  # the shift does not count
    assert got.top1 == 0.5 and got.positions == 2
    assert got.max_abs_diff == pytest.approx(3 + np.log(2))
    assert got.relative == pytest.approx((3 + np.log(2)) / np.log(10))


# Against transformers.


@pytest.mark.torch
@pytest.mark.parametrize("full", [False, True], ids=["thinker", "omni"])
def test_transformers_agrees(tmp_path, source, full):
    pytest.importorskip("transformers")
    src = source(dtype="float32", full=full)
    for name, tensor in src.tensors.items():
        src.tensors[name] = tensor * np.float32(0.3)
    folder = src.save()
    to_orbax.write(open_source(folder), tmp_path / "checkpoint")
    report = verify.verify(folder, tmp_path / "checkpoint", chunks=4)
    assert (report.behaviour.a, report.behaviour.b) == ("transformers", "ours")
    assert report.verdict == "same", report.reasons
    assert 0 < report.behaviour.relative <= verify.LOGITS_TOLERANCE
    assert all(0 <= clip.kl < 1e-8 and clip.top1 == 1 for clip in report.behaviour.clips)
    assert len(report.behaviour.greedy.a) >= 4


@pytest.mark.torch
def test_a_tensor_that_transformers_misses_is_an_error(source):
    pytest.importorskip("transformers")
    src, other = source("a"), source("b")
    opened = open_source(src.save())
    name = "model.layers.0.mlp.up_proj.weight"
    other.tensors[f"{name}s"] = other.tensors.pop(name)
    elsewhere = dataclasses.replace(opened, path=other.save())
    with pytest.raises(UserError, match=f"'.*{name}' is missing"):
        verify.verify(elsewhere, opened, chunks=1)
