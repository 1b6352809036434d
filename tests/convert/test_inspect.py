"""inspect: what a model on disk is, and a fingerprint that only the model's content changes."""

import dataclasses
import importlib.resources
import json
import math
import weakref

import numpy as np
import pytest
from rich.console import Console

from ai_jax.convert import mapping, to_orbax
from ai_jax.convert.inspect import fingerprint_of, inspect, table
from ai_jax.convert.open import open_source
from ai_jax.errors import UserError

QUERY = "model.layers.{}.self_attn.q_proj.weight"


def checkpoint(folder, out, **kwargs):
    to_orbax.write(open_source(folder), out, **kwargs)
    return out


def model_of(path):
    return inspect(path, fingerprint=True).fingerprint.model


def printed(report):
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table(report))
    return capture.get()


# The report.


def test_the_parts_add_up(source, tiny):
    report = inspect(source(full=True).save())
    groups = {g.name: g for g in report.groups}
    layers = [s for n, s in mapping.expected(tiny).items() if n.startswith("model.layers.")]
    assert groups["decoder layers"].tensors == len(layers)
    assert groups["decoder layers"].parameters == sum(map(math.prod, layers))
    assert groups["decoder layers"].bytes == 2 * groups["decoder layers"].parameters
    assert groups["token2wav"].dtypes == ("float32",)
    assert {n for n, g in groups.items() if not g.runs} == {"vision", "talker", "token2wav"}
    assert report.parameters == sum(g.parameters for g in report.groups)
    assert report.parameters_run == sum(map(math.prod, mapping.expected(tiny).values()))
    assert report.bytes == sum(g.bytes for g in report.groups)
    assert report.dtypes == {"bfloat16": len(mapping.expected(tiny)) + 1, "float32": 2}


def test_it_reads_no_weights_unless_asked(source):
    def refuse(names):
        raise AssertionError("weights were read")

    opened = dataclasses.replace(open_source(source().save()), fetch=refuse)
    assert inspect(opened).fingerprint is None
    with pytest.raises(AssertionError):
        inspect(opened, fingerprint=True)


def test_a_checkpoint_says_how_it_was_made(tmp_path, source):
    out = checkpoint(source(full=True).save(), tmp_path / "out", dtype="float16", skip=["vision"])
    report = inspect(out)
    assert report.kind == "orbax"
    assert "vision" not in {g.name for g in report.groups}
    assert report.conversion["skipped"] == ["vision"] and report.conversion["dtype"] == "float16"
    assert "conversion: dtype" in printed(report)


def test_the_model_of_the_package():
    folder = importlib.resources.files("ai_jax.assets.nano")
    with importlib.resources.as_file(folder) as path:
        report = inspect(path, fingerprint=True)
    assert report.name == "nano" and report.tokenizer
    assert report.chunk_seconds == 0.4 and report.stream["format"]["response"] == 1023
    text = printed(report)
    assert report.fingerprint.model in text and "decoder layers" in text
    again = json.loads(json.dumps(report.to_json()))
    assert again["provenance"] == report.provenance
    assert again["groups"][0]["parameters"] == report.groups[0].parameters


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(UserError, match="not a model"):
        inspect(tmp_path)


# The fingerprint.


def test_the_same_model_in_every_form(tmp_path, source):
    src = source(full=True)
    names = list(src.tensors)
    whole = model_of(src.save())
    src.folder = tmp_path / "sharded"
    sharded = src.save(shards=[names[::3], names[1::3], names[2::3]])
    assert model_of(sharded) == whole
    assert model_of(checkpoint(sharded, tmp_path / "checkpoint")) == whole
    assert model_of(checkpoint(sharded, tmp_path / "slim", skip=["vision", "talker"])) == whole
    src.folder = tmp_path / "thinker"
    tensors = {name.removeprefix("thinker."): t for name, t in src.tensors.items()}
    src.tensors = {name: t for name, t in tensors.items() if not name.startswith("tal")}
    src.config = src.config["thinker_config"]
    assert model_of(src.save()) == whole


def test_what_is_carried_has_its_own(tmp_path, source):
    src = source(full=True)
    before = fingerprint_of(open_source(src.save()))
    src.tensors["talker.model.norm.weight"][3] += 1
    after = fingerprint_of(open_source(src.save()))
    assert after.model == before.model and after.carried != before.carried
    slim = checkpoint(src.folder, tmp_path / "slim", skip=["vision", "talker"])
    assert fingerprint_of(open_source(slim)).carried is None


@pytest.mark.parametrize("change", ["bit", "swap", "dtype"])
def test_another_model_has_another_fingerprint(source, change):
    src = source()
    before = model_of(src.save())
    first, second = QUERY.format(0), QUERY.format(1)
    if change == "bit":
        src.tensors[first].view(np.uint16)[5, 7] ^= 1
    elif change == "swap":
        src.tensors[first], src.tensors[second] = src.tensors[second], src.tensors[first]
    else:
        src.tensors = {name: t.astype(np.float32) for name, t in src.tensors.items()}
    assert model_of(src.save()) != before


def test_names_and_shapes_count(source):
    opened = open_source(source().save())
    before = fingerprint_of(opened).model
    first = QUERY.format(0)

    def renamed(name):
        return "elsewhere" if name == first else name

    def fetch(names):
        back = [first if name == "elsewhere" else name for name in names]
        return ((renamed(name), tensor) for name, tensor in opened.fetch(back))

    other = dataclasses.replace(
        opened,
        specs={renamed(name): spec for name, spec in opened.specs.items()},
        params=tuple(map(renamed, opened.params)),
        fetch=fetch,
    )
    assert fingerprint_of(other).model != before
    shape = opened.specs[first].shape
    flat = dataclasses.replace(opened.specs[first], shape=(math.prod(shape),))
    reshaped = dataclasses.replace(opened, specs={**opened.specs, first: flat})
    assert fingerprint_of(reshaped).model != before


def test_it_holds_few_tensors_at_a_time(source):
    opened = open_source(source().save())
    alive: set[int] = set()
    most = 0

    def fetch(names):
        nonlocal most
        for i, (name, tensor) in enumerate(opened.fetch(names)):
            copy = tensor.copy()
            alive.add(i)
            weakref.finalize(copy, alive.discard, i)
            most = max(most, len(alive))
            yield name, copy
            del copy

    fingerprint_of(dataclasses.replace(opened, fetch=fetch))
    assert 1 < most <= 4
