"""The authors' model in torch and ours compute the same; PyTorch's files in and out."""

import dataclasses
import mmap
import zipfile

import jax
import numpy as np
import pytest

pytest.importorskip("torch")

import release_double
import torch
from release_double import BF16, TOWER, Release

from ai_jax.convert import pickles
from ai_jax.convert.from_release import from_release
from ai_jax.convert.load import load
from ai_jax.convert.open import open_source
from ai_jax.convert.release import open_release
from ai_jax.convert.to_release import to_release
from ai_jax.errors import UserError
from ai_jax.model import omni

pytestmark = pytest.mark.torch
TOLERANCE = 1e-5


@pytest.fixture
def release(tmp_path, tiny):
    def make(name="release", **kwargs) -> Release:
        return Release(tmp_path / name, tiny, **kwargs)

    return make


def tensors_of(source):
    return {name: np.array(tensor) for name, tensor in source.fetch(list(source.specs))}


def same_bits(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        np.testing.assert_array_equal(a[name].view(np.uint8), b[name].view(np.uint8), name)


# What the models compute.


def stream(config, chunks=4, text=20):
    """Tokens of a stream in the authors' format, and the mel of its chunks."""
    fmt = config.stream.format
    rng = np.random.default_rng(3)
    tokens = fmt.prefix([5, 6, 7])
    for chunk in range(chunks):
        tokens += fmt.chunk(config.audio.chunk_tokens)
        tokens += [fmt.response, 65, 66, fmt.eos] if chunk == 1 else [fmt.silent]
    tokens += rng.integers(0, 200, text).tolist()
    frames = (chunks, config.audio.chunk_frames, config.audio.num_mel_bins)
    return tokens, rng.normal(size=frames).astype(np.float32)


def ours(source, tokens, mel_cfm):
    params = {name: jax.numpy.asarray(x) for name, x in tensors_of(source).items()}
    stacked = omni.stack_layers(params)
    hidden = omni.forward(source.config, stacked, np.array([tokens]), mel_cfm[None], remat=False)
    return np.asarray(omni.unembed(source.config, stacked, hidden)[0])


def relative(got, want):
    return np.abs(got - want).max() / np.abs(want).max()


@pytest.mark.parametrize("grouped", [False, True], ids=["concatenated", "grouped"])
@pytest.mark.parametrize("adapter", [False, True], ids=["proj", "adapter"])
def test_logits_are_those_of_the_authors_layout(release, grouped, adapter):
    theirs = release(grouped=grouped, adapter=adapter)
    source = open_release(theirs.save())
    tokens, mel = stream(source.config)
    want = release_double.run(theirs, source.config, tokens, mel)
    assert relative(ours(source, tokens, mel), want) <= TOLERANCE


def test_taking_one_order_for_the_other_shows(release):
    """The two have the same shapes: only names tell them, so the logits must notice a mix-up."""
    theirs = release()
    theirs.decoder = {k.replace("attn.qkv", "attn.attn"): v for k, v in theirs.decoder.items()}
    source = open_release(theirs.save())
    tokens, mel = stream(source.config)
    back = {k.replace("attn.attn", "attn.qkv"): v for k, v in theirs.decoder.items()}
    theirs.decoder = back
    want = release_double.run(theirs, source.config, tokens, mel)
    assert relative(ours(source, tokens, mel), want) > 0.1


def test_positions_are_rounded_where_asked(release):
    theirs = release()
    folder = theirs.save()
    rounded, plain = open_release(folder, fp16_positions=True), open_release(folder)
    tokens, mel = stream(plain.config, text=2100)
    want = release_double.run(theirs, plain.config, tokens, mel, fp16_positions=True)
    assert relative(ours(rounded, tokens, mel), want) <= TOLERANCE
    assert relative(ours(plain, tokens, mel), want) > 1e-3
    want = release_double.run(theirs, plain.config, tokens, mel)
    assert relative(ours(plain, tokens, mel), want) <= TOLERANCE


# Files.

FORMS = {
    "safetensors": {"lm": "safetensors"},
    "pt": {"lm": "pt"},
    "wrapped": {"lm": "pt", "wrapped": True},
    "legacy": {"lm": "legacy"},
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_tensors(tmp_path, release, form, dtype):
    weird = np.array([0x7F81, 0xFFC0, 0x8000, 0x0001], np.uint16).view(BF16)
    ones = {"dtype": dtype}
    plain, other = release(**ones), release("other", **ones)
    for one in (plain, other):
        if dtype == BF16:
            # NaN payloads, negative zero and denormals are bits like any others.
            one.decoder["transformer.ln_f.weight"][:4] = weird
    a = open_release(plain.save(tower="safetensors"))
    b = open_release(other.save(**FORMS[form]))
    same_bits(tensors_of(a), tensors_of(b))
    assert b.provenance["release"]["wrapped"] == (form == "wrapped")


def test_tensors_are_views_of_the_mapped_file(release):
    source = open_release(release(grouped=False).save(lm="pt"))
    for name, tensor in source.fetch(["model.layers.0.self_attn.k_proj.weight"]):
        owner = tensor
        while isinstance(owner, np.ndarray):
            owner = owner.base
        assert isinstance(owner, mmap.mmap) and not tensor.flags.writeable, name


@pytest.mark.parametrize("grouped", [False, True], ids=["concatenated", "grouped"])
@pytest.mark.parametrize("form", ["safetensors", "pt", "wrapped"])
@pytest.mark.parametrize("adapter", [False, True], ids=["proj", "adapter"])
def test_there_and_back_is_the_same_folder(tmp_path, release, grouped, form, adapter):
    theirs = release(grouped=grouped, adapter=adapter, tower_proj=not adapter, dtype=BF16)
    folder = theirs.save(**FORMS[form])
    there = from_release(folder, tmp_path / "checkpoint")
    back = to_release(tmp_path / "checkpoint", tmp_path / "back")

    assert there.tensors == len(open_source(folder).specs)
    assert back.tensors == len(theirs.decoder) + len(theirs.tower)
    assert back.bytes == sum(x.nbytes for x in (*theirs.decoder.values(), *theirs.tower.values()))
    files = {p.relative_to(folder) for p in folder.rglob("*")}
    made = {p.relative_to(tmp_path / "back") for p in (tmp_path / "back").rglob("*")}
    assert {str(p) for p in made - files} == {"ai_jax.json"} and not files - made
    for path in files:
        if (folder / path).is_file() and path.suffix != ".pth":
            assert (folder / path).read_bytes() == (tmp_path / "back" / path).read_bytes(), path
    for name, kept in (("lit_model.pth", theirs.decoder), (f"{TOWER}.pth", theirs.tower)):
        if (folder / name).exists():
            state = torch.load(tmp_path / "back" / name, weights_only=True, mmap=True)
            state = state["model"] if form == "wrapped" and name == "lit_model.pth" else state
            assert list(state) and state.keys() == kept.keys()
            for key, tensor in state.items():
                assert torch.equal(tensor, release_double.as_torch(kept[key])), key
    again = from_release(tmp_path / "back", tmp_path / "again")
    assert again.tensors == there.tensors
    first, second = (open_source(tmp_path / n) for n in ("checkpoint", "again"))
    same_bits(tensors_of(first), tensors_of(second))
    assert first.config == second.config


@pytest.mark.parametrize("qkv", ["concatenated", "grouped"])
@pytest.mark.parametrize("lm", ["safetensors", "pt"])
def test_a_model_of_ours_becomes_a_folder_of_theirs_and_comes_back(tmp_path, source, qkv, lm):
    src = source(full=True).save()
    made = to_release(src, tmp_path / "release", qkv=qkv, lm=lm)
    opened = open_release(tmp_path / "release")
    assert opened.provenance["release"]["qkv"] == qkv
    assert opened.provenance["release"]["lm"] == lm
    want = open_source(src)
    assert made.tensors < len(want.specs)  # q, k and v are one; vision stays behind
    same_bits(tensors_of(opened), {name: np.array(x) for name, x in want.fetch(list(want.params))})
    assert opened.config == want.config
    from_release(tmp_path / "release", tmp_path / "checkpoint")
    to_release(tmp_path / "checkpoint", tmp_path / "again")
    for path in (tmp_path / "release").rglob("*"):
        if path.is_file() and path.name != "ai_jax.json":
            other = tmp_path / "again" / path.relative_to(tmp_path / "release")
            assert path.read_bytes() == other.read_bytes(), path.name


def test_what_we_write_loads_in_the_authors_way(tmp_path, source):
    """Index, strict names, the tower in transformers' encoder under the full model's config."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder

    to_release(source(dtype="float32").save(), tmp_path / "release")
    index = tmp_path / "release" / "model.safetensors.index.json"
    assert index.exists()
    config = transformers.AutoConfig.from_pretrained(tmp_path / "release" / "qwen25OmniConfig")
    encoder = Qwen2_5OmniAudioEncoder._from_config(config.thinker_config.audio_config)
    state = torch.load(tmp_path / "release" / f"{TOWER}.pth", weights_only=True)
    encoder.load_state_dict(state, strict=True)


def test_a_tied_model_goes_there_and_back(tmp_path, tiny, source):
    config = dataclasses.replace(
        tiny, text=dataclasses.replace(tiny.text, tie_word_embeddings=True)
    )
    src = source(config=config).save()
    to_release(src, tmp_path / "release")
    opened = open_release(tmp_path / "release")
    want = open_source(src)
    same_bits(tensors_of(opened), {name: np.array(x) for name, x in want.fetch(list(want.params))})
    # litgpt's model has a head of its own all the same.
    from safetensors.numpy import load_file

    theirs = load_file(tmp_path / "release" / "model.safetensors")
    assert np.array_equal(theirs["lm_head.weight"], theirs["transformer.wte.weight"])


def test_a_checkpoint_of_a_release_loads_and_keeps_its_format(tmp_path, release, byte_tokenizer):
    theirs = release()
    folder = theirs.save()
    byte_tokenizer._tokenizer.save(str(folder / "tokenizer.json"))
    from_release(folder, tmp_path / "checkpoint", fp16_positions=True, dtype="bfloat16")
    loaded = load(tmp_path / "checkpoint")
    assert loaded.config.text.fp16_positions
    assert loaded.config.stream.format.name == "release"
    assert loaded.params["audio_tower.proj.weight"].dtype == BF16
    assert loaded.tokenizer.encode("ab") == byte_tokenizer.encode("ab")


# Refusals.


class Runs:
    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_with_code_is_not_loaded(release, capsys, legacy):
    folder = release().save()
    path = folder / f"{TOWER}.pth"
    torch.save(
        {"conv1.weight": torch.ones(2), "x": Runs()},
        path,
        _use_new_zipfile_serialization=not legacy,
    )
    with pytest.raises(UserError, match=rf"{TOWER}.pth holds code .* will not be loaded"):
        open_release(folder)
    assert "run" not in capsys.readouterr().out


@pytest.mark.parametrize("lm", ["pt", "legacy"])
@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9])
def test_a_cut_off_file_is_refused(release, lm, keep):
    folder = release().save(lm=lm)
    path = folder / "lit_model.pth"
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(UserError, match=r"lit_model.pth (is not a whole PyTorch file|holds code)"):
        open_release(folder)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(2, dtype=torch.int8), "'x' is int8"),
        (torch.ones(2).to_sparse(), "'x' is no plain tensor"),
        ("text", "'x' is no plain tensor but str"),
    ],
)
def test_what_is_no_plain_tensor_is_refused(release, value, message):
    folder = release().save()
    torch.save({"conv1.weight": torch.ones(2), "x": value}, folder / f"{TOWER}.pth")
    with pytest.raises(UserError, match=message):
        open_release(folder)


def test_a_file_that_is_no_state_dict_is_refused(release):
    folder = release().save()
    torch.save([torch.ones(2)], folder / f"{TOWER}.pth")
    with pytest.raises(UserError, match="holds no state dict"):
        open_release(folder)


def test_views_and_shared_storages_are_read_as_they_are(tmp_path):
    big = torch.arange(60.0).reshape(6, 10)
    state = {"t": big.t(), "rows": big[2:4], "steps": big[:, ::3], "p": torch.nn.Parameter(big)}
    for legacy in (False, True):
        torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=not legacy)
        for name, got in pickles.open_file(tmp_path / "x.pt")[0].items():
            np.testing.assert_array_equal(got, state[name].detach().numpy())


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_archive_packed_by_another_tool_is_read_right(tmp_path, compression):
    """torch computes places in the file from what it would have written."""
    state = {f"w{i}": torch.randn(5 + i, 3) for i in range(4)}
    torch.save(state, tmp_path / "x.pt")
    with (
        zipfile.ZipFile(tmp_path / "x.pt") as old,
        zipfile.ZipFile(tmp_path / "y.pt", "w", compression) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    for name, got in pickles.open_file(tmp_path / "y.pt")[0].items():
        np.testing.assert_array_equal(got, state[name].numpy())


def test_files_that_we_write_are_sound_archives(tmp_path, release):
    folder = release(dtype=BF16).save(lm="pt")
    to_release(folder, tmp_path / "out")
    for name in ("lit_model.pth", f"{TOWER}.pth"):
        with zipfile.ZipFile(tmp_path / "out" / name) as archive:
            assert archive.testzip() is None
        torch.load(tmp_path / "out" / name, weights_only=True, mmap=False)
