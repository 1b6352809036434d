"""Every fault of a folder is one sentence that names what is wrong and what to do about it.

Exit code 2, and afterwards all is as it was: the source, and no target nor a part of one.
"""

import json
import os
import shutil

import numpy as np
import pytest
from refusal import ai_jax, assert_one_sentence, tree
from safetensors.numpy import load_file, save_file
from tiny_folder import DTYPES, Source

from ai_jax.config import ModelConfig, preset
from ai_jax.convert import hf, mapping, shards
from ai_jax.convert.files import INFO, write_info

FIRST, SECOND = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
NORM, EMBEDDING, HEAD = "model.norm.weight", mapping.EMBEDDING, mapping.HEAD
GATE = "model.layers.1.mlp.gate_proj.weight"
AGAIN = "ownload"  # of "Download it again", "download both again" ...


@pytest.fixture(scope="module")
def sound(tmp_path_factory, tiny):
    """A thinker in two shards: the norm is in the first one, the gate of layer 1 in the second."""
    src = Source(tmp_path_factory.mktemp("sound") / "model", tiny)
    names = sorted(src.tensors, key=lambda name: (name == GATE, name != NORM))
    half = len(names) // 2
    return src.save(shards=[names[:half], names[half:]])


@pytest.fixture
def folder(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "model")


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path):
    """Run ``ai-jax convert ARGS`` in vain; its sentence has the parts ``says`` in this order."""

    def refused(*args, says):
        before = tree(tmp_path)
        result = ai_jax(monkeypatch, capsys, "convert", *args)
        assert_one_sentence(*result, *says)
        assert tree(tmp_path) == before

    return refused


# Files.


def header(path):
    return json.loads(shards.read_header(path))


def rewrite_header(path, change):
    """Replace the header of a file, whose bytes of data stay."""
    old = shards.read_header(path)
    content = json.loads(old)
    content = change(content) or content
    new = json.dumps(content).encode()
    data = path.read_bytes()[8 + len(old) :]
    path.write_bytes(len(new).to_bytes(8, "little") + new + data)


def rewrite_tensors(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def rewrite_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def cut(path, size):
    """Keep the first ``size`` bytes of a file; a negative size counts from its end."""
    os.truncate(path, size % path.stat().st_size)


def overlap(content):
    """Have the norm's bytes begin where the tensor before it does."""
    other = next(n for n, e in content.items() if n not in (NORM, "__metadata__"))
    begin, end = place(content, NORM)
    start = place(content, other)[0]
    content[NORM]["data_offsets"] = [start, start + end - begin]


def shift(content):
    """Have the first tensor begin a byte late."""
    first = min((n for n in content if n != "__metadata__"), key=lambda n: place(content, n))
    content[first]["data_offsets"] = [at + 1 for at in place(content, first)]


def place(content, name):
    return content[name]["data_offsets"]


def entry(name, **fields):
    return lambda content: content[name].update(fields)


def in_header(file, change):
    return lambda folder: rewrite_header(folder / file, change)


def in_tensors(file, change):
    return lambda folder: rewrite_tensors(folder / file, change)


def in_index(change):
    return lambda folder: rewrite_json(folder / shards.INDEX, lambda i: change(i["weight_map"]))


def in_config(change):
    return lambda folder: rewrite_json(folder / hf.CONFIG, change)


def add_length(folder, length):
    data = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(length.to_bytes(8, "little") + data[8:])


def swap_shards(folder):
    for old, new in ((FIRST, "x"), (SECOND, FIRST), ("x", SECOND)):
        (folder / old).rename(folder / new)


def nan(tensors):
    tensors[GATE][3, 2] = np.nan


WRONG_WEIGHTS = {
    "a shard is missing": (lambda f: (f / SECOND).unlink(), [SECOND, "is missing", AGAIN]),
    "a shard is a folder": (
        lambda f: ((f / SECOND).unlink(), (f / SECOND).mkdir()),
        [SECOND, "is missing", AGAIN],
    ),
    "a shard is cut off in its data": (lambda f: cut(f / SECOND, -1), [SECOND, "'", AGAIN]),
    "a shard is cut off in its header": (
        lambda f: cut(f / SECOND, 50),
        [SECOND, "header is cut off", AGAIN],
    ),
    "a shard has bytes that belong to no tensor": (
        lambda f: (f / SECOND).open("ab").write(bytes(8)),
        [SECOND, "belong to no tensor", AGAIN],
    ),
    "a header of 2**63 bytes": (
        lambda f: add_length(f, 2**63),
        [SECOND, "header is cut off", AGAIN],
    ),
    "a header of no bytes": (lambda f: add_length(f, 0), [SECOND, "header is not JSON", AGAIN]),
    "tensors overlap": (in_header(FIRST, overlap), [FIRST, f"'{NORM}'", AGAIN]),
    "a tensor begins a byte late": (
        in_header(FIRST, shift),
        [FIRST, "bytes 0 to 1, before the tensor '", "belong to no tensor", AGAIN],
    ),
    "sizes below zero": (
        in_header(FIRST, entry(NORM, shape=[-1, -48])),
        [FIRST, f"'{NORM}'", AGAIN],
    ),
    "sizes that are no numbers": (
        in_header(FIRST, entry(NORM, shape=["a"])),
        [FIRST, f"'{NORM}'", AGAIN],
    ),
    "places that are no numbers": (
        in_header(FIRST, entry(NORM, data_offsets=["a", "b"])),
        [FIRST, f"'{NORM}'", AGAIN],
    ),
    "shards under each other's name": (
        swap_shards,
        [shards.INDEX, "promises the tensor", FIRST, AGAIN],
    ),
    "the index has a tensor elsewhere": (
        in_index(lambda files: files.update({GATE: FIRST})),
        [shards.INDEX, f"'{GATE}' in {FIRST}", AGAIN],
    ),
    "the index has a tensor that is nowhere": (
        in_index(lambda files: files.update({"model.extra": SECOND})),
        [shards.INDEX, f"'model.extra' in {SECOND}", AGAIN],
    ),
    "the index lacks a tensor": (
        in_index(lambda files: files.pop(GATE)),
        [SECOND, f"'{GATE}'", shards.INDEX, AGAIN],
    ),
    "the index is cut off": (lambda f: cut(f / shards.INDEX, 99), [shards.INDEX, AGAIN]),
    "the index is a folder": (
        lambda f: ((f / shards.INDEX).unlink(), (f / shards.INDEX).mkdir()),
        [shards.INDEX, AGAIN],
    ),
    "a tensor in both shards": (
        in_tensors(FIRST, lambda tensors: tensors.update({GATE: tensors[NORM]})),
        [f"'{GATE}' is in both {FIRST} and {SECOND}", "Delete the file"],
    ),
    "an integer tensor": (
        in_tensors(FIRST, lambda tensors: tensors.update({NORM: np.ones(48, np.int64)})),
        [f"'{NORM}' is int64", "give the unquantised model"],
    ),
    "a tensor of 8 bits": (
        in_header(FIRST, entry(NORM, dtype="F8_E4M3", shape=[96])),
        [f"'{NORM}' is float8", "give the unquantised model"],
    ),
    "a dtype that nobody knows": (
        in_header(FIRST, entry(NORM, dtype="F4")),
        [FIRST, f"'{NORM}' has the dtype F4", "give the unquantised model"],
    ),
    "one NaN": (in_tensors(SECOND, nan), [f"'{GATE}' holds NaN", AGAIN, "--allow-nan"]),
}


@pytest.mark.parametrize("fault", WRONG_WEIGHTS)
def test_weights(folder, refused, tmp_path, fault):
    damage, says = WRONG_WEIGHTS[fault]
    damage(folder)
    refused("from-hf", folder, tmp_path / "out", says=says)


def describe(folder):
    """Put our own description into a folder, which counts more than its config.json."""
    write_info(folder / INFO, hf.model_config(folder), {})


WRONG_CONFIG = {
    "it is missing": (lambda f: (f / hf.CONFIG).unlink(), ["has no config.json", "give a folder"]),
    "it is cut off": (lambda f: cut(f / hf.CONFIG, 99), [hf.CONFIG, AGAIN]),
    "it is not text": (lambda f: (f / hf.CONFIG).write_bytes(b"\xff\xfe"), [hf.CONFIG, AGAIN]),
    "it is no mapping": (lambda f: (f / hf.CONFIG).write_text("[]"), [hf.CONFIG, AGAIN]),
    "it is damaged, but our own description is not": (
        lambda f: (describe(f), cut(f / hf.CONFIG, 99)),
        [hf.CONFIG, AGAIN],
    ),
    "it is missing, but our own description is not": (
        lambda f: (describe(f), (f / hf.CONFIG).unlink()),
        ["has no config.json", "give a folder"],
    ),
    "another model": (
        in_config(lambda c: c.update(model_type="llama")),
        [hf.CONFIG, "'llama'", "give a Qwen2.5-Omni"],
    ),
    "no thinker": (
        in_config(lambda c: c.update(thinker_config="thinker")),
        [hf.CONFIG, "thinker_config", AGAIN],
    ),
    "a section that is none": (
        in_config(lambda c: c.update(text_config=[1])),
        [hf.CONFIG, "text_config", AGAIN],
    ),
    "no heads": (
        in_config(lambda c: c["text_config"].update(num_attention_heads=0)),
        [hf.CONFIG, "text_config.num_attention_heads", AGAIN],
    ),
    "heads that are no number": (
        in_config(lambda c: c["text_config"].update(head_dim=None, num_attention_heads="four")),
        [hf.CONFIG, "text_config.num_attention_heads", AGAIN],
    ),
    "a rope that is none": (
        in_config(lambda c: c["text_config"].update(rope_parameters="default")),
        [hf.CONFIG, "rope_parameters", AGAIN],
    ),
    "half a channel": (
        in_config(lambda c: c["text_config"].update(hidden_size=48.5)),
        [hf.CONFIG, "text_config.hidden_size", "whole number", AGAIN],
    ),
    "a vocabulary that is no number": (
        in_config(lambda c: c["text_config"].update(vocab_size="many")),
        [hf.CONFIG, "text_config.vocab_size", AGAIN],
    ),
    "a layer less": (
        in_config(lambda c: c["text_config"].update(num_hidden_layers=2)),
        ["'model.layers.2.", "has no place", "Remove it, or correct"],
    ),
    "a layer more": (
        in_config(lambda c: c["text_config"].update(num_hidden_layers=4)),
        ["'model.layers.3.", "is missing", "Download"],
    ),
    "its own description is damaged": (
        lambda f: (f / INFO).write_text("{"),
        [INFO, "restore it"],
    ),
}


@pytest.mark.parametrize("fault", WRONG_CONFIG)
def test_config(folder, refused, tmp_path, fault):
    damage, says = WRONG_CONFIG[fault]
    damage(folder)
    refused("from-hf", folder, tmp_path / "out", says=says)


def test_heads_and_configs_mixed_up(folder, refused, tmp_path):
    in_config(lambda c: c.update(tie_word_embeddings=True))(folder)
    says = ["ties the head", f"'{HEAD}' differs", "set tie_word_embeddings to false", "remove"]
    refused("from-hf", folder, tmp_path / "out", says=says)

    in_config(lambda c: c.update(tie_word_embeddings=False))(folder)
    file = json.loads((folder / shards.INDEX).read_text())["weight_map"][HEAD]
    in_index(lambda files: files.pop(HEAD))(folder)
    in_tensors(file, lambda tensors: tensors.pop(HEAD))(folder)
    says = [f"'{HEAD}' is missing", "Download", "set tie_word_embeddings to true"]
    refused("from-hf", folder, tmp_path / "out", says=says)


def test_nan_is_kept_when_asked(folder, tmp_path, monkeypatch, capsys):
    payload = np.array([0x7F81, 0xFFC3], np.uint16)  # a signalling and a negative NaN

    def put(tensors):
        tensors[GATE].view(np.uint16)[5, :2] = payload

    in_tensors(SECOND, put)(folder)
    checkpoint = tmp_path / "checkpoint"
    for args in (
        ("from-hf", folder, checkpoint, "--allow-nan"),
        ("to-hf", checkpoint, tmp_path / "back"),
    ):
        code, _, err = ai_jax(monkeypatch, capsys, "convert", *args)
        assert (code, err) == (0, "")
    assert (tmp_path / "back" / SECOND).read_bytes() == (folder / SECOND).read_bytes()


# Models of real sizes: files of headers, whose data are holes.


def write_headers(folder, shapes):
    """One file with these bfloat16 tensors of zeros, which takes no room on disk."""
    content, end = {}, 0
    for name, shape in shapes.items():
        spec = shards.Spec(shape, np.dtype(DTYPES["bfloat16"]))
        content[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + spec.nbytes]}
        end += spec.nbytes
    text = json.dumps(content).encode()
    path = folder / shards.SINGLE
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)


SIZES_7B = {  # where Qwen2.5-Omni-7B differs from 3B, in its published config
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}


@pytest.fixture
def real(tmp_path):
    """A folder of the size of Qwen2.5-Omni-3B: its path, shapes and config (to be saved)."""
    model = preset("model", "qwen2_5_omni_3b", ModelConfig)
    (tmp_path / "real").mkdir()
    config = hf.to_hf_config(model, np.dtype(DTYPES["bfloat16"]))
    shapes = {mapping.PREFIX + name: shape for name, shape in mapping.expected(model).items()}
    return tmp_path / "real", shapes, config


def save(folder, shapes, config):
    write_headers(folder, shapes)
    (folder / hf.CONFIG).write_text(json.dumps(config))


def test_the_config_of_another_size(real, refused, tmp_path):
    folder, shapes, config = real
    config["text_config"] |= SIZES_7B
    config["audio_config"]["output_dim"] = 3584
    save(folder, shapes, config)
    layer = "'thinker.model.layers.28."
    says = [layer, "has no place in this model", "correct the sizes and layer counts", "config"]
    refused("from-hf", folder, tmp_path / "out", says=says)
    # With as many layers, the shapes tell.
    config["text_config"]["num_hidden_layers"] = 36
    save(folder, shapes, config)
    says = ["'thinker.audio_tower.", "[2, 2048]", "[2, 3584]", "put the config of these weights"]
    refused("from-hf", folder, tmp_path / "out", says=says)


def test_a_vocabulary_cut_to_what_the_tokenizer_has(real, refused, tmp_path):
    folder, shapes, config = real
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        shapes[mapping.PREFIX + name] = (151665, 2048)
    save(folder, shapes, config)
    remedy = ["resize", "151936 rows", "take the original checkpoint"]
    says = ["embed_tokens.weight'", "[151665, 2048]", *remedy]
    refused("from-hf", folder, tmp_path / "out", says=says)
    config["text_config"]["vocab_size"] = 151665
    save(folder, shapes, config)
    refused("from-hf", folder, tmp_path / "out", says=["config.json", "151665", *remedy])
