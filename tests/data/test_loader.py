"""The loader: pure examples, and batches that no worker or host count and no restart changes."""

import dataclasses
import itertools
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from ai_jax.audio.mel import log_mel
from ai_jax.config import ModelConfig, from_dict, preset, to_dict
from ai_jax.data import nano
from ai_jax.data.annotate import MASK, timeline_of
from ai_jax.data.compose import ComposeConfig, Event, Plan, compose
from ai_jax.data.loader import Examples, LoaderConfig, event_target, make_loader
from ai_jax.errors import UserError
from ai_jax.tokens import TextTokenizer

MODEL = preset("model", "tiny", ModelConfig)
CONFIG = LoaderConfig(batch_size=2, chunks=4, max_tokens=96, seed=3)
LABELS = ("beep", "hiss")


def make_tokenizer() -> TextTokenizer:
    """Byte-level without merges, with the control token <silent> of the tiny model."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tok = Tokenizer(models.BPE(vocab={**vocab, "<silent>": 300}, merges=[]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.add_special_tokens([AddedToken("<silent>", special=True)])
    return TextTokenizer(tok)


TOKENIZER = make_tokenizer()


def make_planner(response="<silent>!"):
    def planner(rng):
        """Nested, so that it travels to workers by value."""
        t = np.arange(8000) / 16000
        beep = np.sin(2 * np.pi * rng.uniform(300, 3000) * t).astype(np.float32) / 4
        hiss = 0.05 * rng.standard_normal(12000, np.float32)
        events = [
            Event(np.zeros(rng.integers(1, 8000), np.float32)),
            Event(beep, response=response, label="beep"),
            Event(hiss, "background", label="hiss"),
        ]
        return Plan(events, [hiss], [hiss])

    return planner


def load(config=CONFIG, start=0, planner=None, **options):
    return make_loader(
        config,
        start,
        model=MODEL,
        tokenizer=TOKENIZER,
        planner=planner or make_planner(),
        labels=LABELS,
        **options,
    )


def take(n, iterator):
    batches = [{k: np.array(v) for k, v in b.items()} for b in itertools.islice(iterator, n)]
    iterator.close()
    return batches


def assert_same(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape
            assert a[name].tobytes() == b[name].tobytes(), name


@pytest.fixture(scope="module")
def reference():
    """The first 12 examples, one by one."""
    examples = Examples(CONFIG, MODEL, TOKENIZER, make_planner(), LABELS)
    return [examples(i) for i in range(12)]


def stacked(examples):
    return {name: np.stack([e[name] for e in examples]) for name in examples[0]}


def test_shapes_and_dtypes():
    (batch,) = take(1, load())
    assert {name: (x.dtype.name, x.shape) for name, x in batch.items()} == {
        "tokens": ("int32", (2, 96)),
        "stream_target": ("int32", (2, 96)),
        "lm_target": ("int32", (2, 96)),
        "mel": ("float32", (2, 4, 40, 80)),
        "event_target": ("float32", (2, 4, 2)),
    }


def test_example_is_compose_then_mel_then_annotate():
    index = 5
    rng = np.random.Generator(np.random.Philox(key=[CONFIG.seed, index]))
    stream = compose(*make_planner()(rng), rng, chunks=4)
    example = Examples(CONFIG, MODEL, TOKENIZER, make_planner(), LABELS)(index)
    mel = log_mel(stream.audio, MODEL.mel)
    assert mel.shape == (160, 80)
    np.testing.assert_array_equal(example["mel"].reshape(160, 80), mel)
    used = example["tokens"] != MODEL.stream.format.pad
    n = used.sum()
    assert used[:n].all()
    assert (
        timeline_of(MODEL.stream.format, TOKENIZER, example["tokens"][:n]) == stream.timeline != ()
    )
    assert (example["stream_target"][n:] == MASK).all()
    assert (example["lm_target"][n:] == MASK).all()
    np.testing.assert_array_equal(
        example["event_target"], event_target(stream.spans, LABELS, 4, 0.4)
    )


def test_examples_depend_on_seed_and_index_alone(reference):
    examples = Examples(CONFIG, MODEL, TOKENIZER, make_planner(), LABELS)
    for i in (7, 0, 7):
        assert_same([examples(i)], [reference[i]])
    other = Examples(dataclasses.replace(CONFIG, seed=4), MODEL, TOKENIZER, make_planner(), LABELS)
    mels = [e["mel"].tobytes() for e in reference] + [other(i)["mel"].tobytes() for i in range(3)]
    assert len(set(mels)) == 15


@pytest.mark.parametrize(
    ("workers", "start", "batch_size"), [(0, 0, 2), (0, 5, 3), (1, 3, 2), (2, 1, 3)]
)
def test_any_worker_count_resumes_at_any_position(reference, workers, start, batch_size):
    config = dataclasses.replace(CONFIG, workers=workers, batch_size=batch_size)
    got = take(2 if batch_size == 3 else 4, load(config, start))
    want = [
        stacked(reference[i : i + batch_size])
        for i in range(start, start + len(got) * batch_size, batch_size)
    ]
    assert_same(got, want)


def test_hosts_share_each_global_batch(reference):
    config = dataclasses.replace(CONFIG, batch_size=4)
    parts = [take(2, load(config, 1, host=h, hosts=2)) for h in range(2)]
    for k in range(2):
        whole = {n: np.concatenate([p[k][n] for p in parts]) for n in parts[0][k]}
        assert_same([whole], [stacked(reference[1 + 4 * k : 5 + 4 * k])])


def test_import_leaves_jax_alone():
    code = "import sys, ai_jax.data.loader; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_workers_never_start_a_jax_backend():
    def planner(rng, plan=make_planner()):  # noqa: B008
        # Grain itself imports jax.tree_util; nothing may go further.
        bridge = sys.modules.get("jax._src.xla_bridge")
        assert bridge is None or not bridge.backends_are_initialized()
        assert not any(m.startswith(("ai_jax.model", "ai_jax.train", "flax")) for m in sys.modules)
        return plan(rng)

    take(1, load(dataclasses.replace(CONFIG, workers=1), planner=planner))


@pytest.mark.parametrize("workers", [0, 1])
def test_too_many_tokens_says_so_with_the_numbers(workers):
    config = dataclasses.replace(CONFIG, max_tokens=48, workers=workers)
    with pytest.raises(UserError, match=r"needs 54 tokens \(4 chunks, 1 responses\).* is 48"):
        take(1, load(config))
    assert take(1, load(dataclasses.replace(CONFIG, max_tokens=54)))[0]["tokens"].shape == (2, 54)


def test_settings_that_do_not_fit():
    for bad in ({"batch_size": 0}, {"chunks": 0}, {"workers": -1}, {"seed": -1}):
        with pytest.raises(UserError):
            dataclasses.replace(CONFIG, **bad)
    with pytest.raises(UserError):
        load(hosts=3)
    with pytest.raises(UserError):
        load(start=-1)
    with pytest.raises(UserError, match=r"listens in chunks of 0\.4 s"):
        load(dataclasses.replace(CONFIG, compose=ComposeConfig(chunk=0.2)))
    with pytest.raises(UserError, match="material"):
        make_loader(CONFIG, model=MODEL, tokenizer=TOKENIZER, labels=LABELS)


def test_the_nano_model_s_streams_are_the_default(tmp_path):
    (tmp_path / "manifest.jsonl").touch()  # no recordings: everything is synthesised
    config = dataclasses.replace(CONFIG, material=str(tmp_path), max_tokens=512)
    (batch,) = take(1, make_loader(config, model=MODEL, tokenizer=TOKENIZER))
    assert batch["event_target"].shape == (2, 4, len(nano.LABELS))
    assert batch["mel"].std() > 0


def test_config_is_a_yaml_mapping():
    assert from_dict(LoaderConfig, to_dict(CONFIG)) == CONFIG
    assert from_dict(LoaderConfig, {"compose": {"snr_db": [0, 10]}}).compose.snr_db == (0.0, 10.0)


def test_event_target_needs_a_tenth_of_a_second():
    spans = [(0.35, 0.95, "a"), (0.7, 0.9, "b"), (1.2, 1.25, "b"), (0.0, 2.0, "unlisted")]
    target = event_target(spans, ("a", "b"), 4, 0.4)
    np.testing.assert_array_equal(target[:, 0], [0, 1, 1, 0])
    np.testing.assert_array_equal(target[:, 1], [0, 1, 1, 1])
