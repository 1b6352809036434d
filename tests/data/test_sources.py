"""Material: selection is exact, clips come back as written, a broken manifest is explained."""

import json

import numpy as np
import pytest

from ai_jax.audio import io
from ai_jax.data.sources import Material, Row
from ai_jax.errors import UserError

ROW = {
    "path": "a.flac",
    "kind": "event",
    "labels": ["Dog", "Bark"],
    "text": "",
    "voice": "",
    "split": "train",
    "duration_s": 0.5,
    "source": "apt:dogs=1:bark.wav",
    "licence": "CC0-1.0",
}


def write_manifest(folder, rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "manifest.jsonl").write_text("".join(line + "\n" for line in lines))


def test_selection_combines_kind_split_and_label(tmp_path):
    rows = [
        ROW | {"path": f"{kind}-{split}.flac", "kind": kind, "split": split, "labels": labels}
        for kind in ("word", "event")
        for split in ("train", "val", "test")
        for labels in (["Dog", "Bark"],)
    ]
    rows.append(ROW | {"path": "cat.flac", "labels": ["Cat"]})
    write_manifest(tmp_path, rows)
    material = Material(tmp_path)
    assert [row.path for row in material.rows()] == [row["path"] for row in rows]
    assert len(material.rows(kind="event")) == 4
    assert len(material.rows(split="train")) == 3
    assert [r.path for r in material.rows(kind="event", split="train", label="Bark")] == [
        "event-train.flac"
    ]
    assert material.rows(label="Ba") == ()


def test_row_round_trip(tmp_path):
    write_manifest(tmp_path, [ROW])
    assert Material(tmp_path).rows() == (Row(**{**ROW, "labels": ("Dog", "Bark")}),)


def test_read_gives_the_samples(tmp_path):
    audio = np.random.default_rng(0).uniform(-0.5, 0.5, 8000).astype(np.float32)
    io.write(tmp_path / "a.flac", audio)
    write_manifest(tmp_path, [ROW])
    material = Material(tmp_path)
    got = material.read(material.rows()[0])
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, audio, atol=2**-15)  # 16-bit FLAC


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "manifest.jsonl:2: not valid JSON"),
        ("[]", "manifest.jsonl:2: expected exactly the keys"),
        (ROW | {"lables": []}, r"check \['lables'\]"),
        ({k: v for k, v in ROW.items() if k != "voice"}, r"check \['voice'\]"),
        (ROW | {"kind": "sound"}, "kind 'sound' must be one of word, speech"),
        (ROW | {"split": "dev"}, "split 'dev' must be one of train, val, test"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, message):
    write_manifest(tmp_path, [ROW, line])
    with pytest.raises(UserError, match=message):
        Material(tmp_path)


def test_missing_folder_says_how_to_build_one(tmp_path):
    with pytest.raises(UserError, match=r"scripts/nano_material\.py"):
        Material(tmp_path / "none")


def test_missing_clip_is_a_user_error(tmp_path):
    write_manifest(tmp_path, [ROW])
    material = Material(tmp_path)
    with pytest.raises(UserError, match=r"a\.flac"):
        material.read(material.rows()[0])
