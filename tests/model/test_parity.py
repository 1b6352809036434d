"""Equal to transformers' Qwen2.5-Omni thinker with the same random weights, in float32.

Tolerances: 1e-5 for each module, 1e-4 for logits, absolute, on values of order one.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
import reference  # noqa: E402

from ai_jax.config import ModelConfig  # noqa: E402
from ai_jax.model import omni  # noqa: E402
from ai_jax.model.audio_encoder import audio_tokens  # noqa: E402
from ai_jax.model.cache import init_cache  # noqa: E402
from ai_jax.model.layers import rope_angles  # noqa: E402

pytestmark = pytest.mark.torch
encode = jax.jit(omni.encode, static_argnums=0)
extend = jax.jit(omni.extend, static_argnums=0, donate_argnums=2)


@functools.partial(jax.jit, static_argnums=0)
def one_pass_of(graphdef, state, tokens_bt, audio_bnd):
    """Logits at every position, without a cache."""
    model = nnx.merge(graphdef, state)
    return model.logits(model.model(model.embed(tokens_bt, audio_bnd)))


@dataclasses.dataclass
class Pair:
    config: ModelConfig
    theirs: torch.nn.Module
    ours: omni.AudioInteractionModel

    def mel(self, seed, frames):
        rng = np.random.default_rng(seed)
        return rng.standard_normal((frames, self.config.audio.num_mel_bins)).astype(np.float32)

    def rows(self, mel_fm):
        """A clip as rows of chunks: mel [c, chunk_frames, m] padded with junk, frames [c]."""
        size = self.config.audio.chunk_frames
        chunks = -(-len(mel_fm) // size)
        mel = np.full((chunks * size, mel_fm.shape[1]), 7.0, np.float32)
        mel[: len(mel_fm)] = mel_fm
        frames = np.full(chunks, size)
        frames[-1] -= len(mel) - len(mel_fm)
        return mel.reshape(chunks, size, -1), frames

    def encode(self, mel_fm):
        """Our audio vectors of a clip, laid end to end."""
        mel, frames = self.rows(mel_fm)
        out = encode(*nnx.split(self.ours), mel, jnp.asarray(frames))
        counts = audio_tokens(frames)
        return np.concatenate([x[:n] for x, n in zip(out, counts, strict=True)])


def make_pair(tiny, text=None, **audio):
    encoder = dataclasses.replace(tiny.audio, **audio)
    frames = {"n_mels": encoder.num_mel_bins, "chunk_frames": encoder.chunk_frames}
    config = dataclasses.replace(
        tiny,
        audio=encoder,
        text=dataclasses.replace(tiny.text, **(text or {})),
        mel=dataclasses.replace(tiny.mel, **frames),
    )
    theirs = reference.thinker(config)
    return Pair(config, theirs, omni.build(config, reference.params_of(theirs, config)))


@pytest.fixture(scope="module")
def pair(tiny):
    return make_pair(tiny)


@pytest.fixture(scope="module")
def offline(tiny):
    """The stock offline model's blocks of 2 s, and 128 mel bins."""
    return make_pair(tiny, num_mel_bins=128, n_window=100)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def close(ours, theirs, tolerance=1e-5):
    if isinstance(theirs, torch.Tensor):
        theirs = theirs.detach().numpy()
    assert ours.shape == theirs.shape
    assert np.abs(theirs).max() > 0.1
    assert np.abs(np.asarray(ours) - theirs).max() <= tolerance


# Modules.


def test_audio_modules(pair):
    theirs, ours = pair.theirs.model.audio_tower, pair.ours.audio_tower
    x, mel = normal(0, 20, 32), pair.mel(1, 40)
    tx, ends = torch.tensor(x), torch.tensor([0, 20], dtype=torch.int32)
    close(ours.conv1(mel[None])[0].T, theirs.conv1(torch.tensor(mel).T))
    close(ours.conv2(x[None])[0].T, theirs.conv2(tx.T))
    close(ours.ln_post(x), theirs.ln_post(tx))
    close(ours.proj(x), theirs.proj(tx))
    mine, layer = ours.layers[1], theirs.layers[1]
    close(mine.self_attn(x[None], None)[0], layer.self_attn(tx, cu_seqlens=ends))
    close(mine(x[None], None)[0], layer(tx, cu_seqlens=ends)[0])


def test_decoder_modules(pair):
    theirs, ours = pair.theirs.model.language_model, pair.ours.model
    x = normal(0, 1, 9, 48)
    tx = torch.tensor(x)
    mine, layer = ours.layers[1], theirs.layers[1]
    close(mine.mlp(x), layer.mlp(tx))
    close(mine.input_layernorm(x), layer.input_layernorm(tx))
    angle = rope_angles(jnp.arange(9)[None], 12, pair.config.text.rope_theta)
    rope = jnp.cos(angle), jnp.sin(angle)
    position = theirs.rotary_emb(tx, torch.arange(9).view(1, 1, -1).expand(3, 1, -1))
    for turned, half in zip(position, rope, strict=True):
        close(np.concatenate([half] * 2, -1), turned)
    mask = torch.full((9, 9), -torch.inf).triu(1)[None, None]
    close(mine.self_attn(x, rope), layer.self_attn(tx, mask, position_embeddings=position)[0])
    close(mine(x, rope), layer(tx, mask, position_embeddings=position))
    close(ours(jnp.asarray(x)), theirs(inputs_embeds=tx).last_hidden_state)
    ids = torch.tensor([[1, 300, 5]])
    close(ours.embed_tokens(ids.numpy()), theirs.embed_tokens(ids))


# The audio encoder.


@pytest.mark.parametrize("frames", [40, 120, 103, 83, 42])
def test_encoder_on_chunks_and_a_partial_last_one(pair, frames):
    mel = pair.mel(frames, frames)
    close(pair.encode(mel), reference.encode(pair.theirs, mel, [frames]))


@pytest.mark.parametrize("frames", [200, 400, 523])
def test_encoder_offline(offline, frames):
    mel = offline.mel(frames, frames)
    close(offline.encode(mel), reference.encode(offline.theirs, mel, [frames]))


def test_encoder_on_clips_of_different_lengths(pair):
    lengths = [80, 57, 3]
    clips = [pair.mel(n, n) for n in lengths]
    together = reference.encode(pair.theirs, np.concatenate(clips), lengths)
    close(np.concatenate([pair.encode(clip) for clip in clips]), together)


def test_a_chunk_is_a_call_of_its_own(pair):
    """What lets a stream be encoded as it comes: chunks do not see each other."""
    mel = pair.mel(0, 120)
    alone = [reference.encode(pair.theirs, mel[i : i + 40], [40]) for i in (0, 40, 80)]
    close(pair.encode(mel), np.concatenate(alone))


def test_positions_of_whisper(pair):
    from ai_jax.model.audio_encoder import _sinusoids

    table = pair.theirs.model.audio_tower.positional_embedding.positional_embedding[:100]
    # Angles reach 100, where float32 values are 7.6e-6 apart.
    close(_sinusoids(100, pair.config.audio.d_model), table, tolerance=1e-5)


# Logits.


def stream(config, frames):
    """Tokens of a prefix, the clip's chunks with decisions between, and a reply."""
    fmt, size = config.stream.format, config.audio.chunk_frames
    tokens = [1, 2, 3]
    for start in range(0, frames, size):
        tokens += [fmt.audio] * audio_tokens(min(size, frames - start)) + [fmt.silent]
    return [*tokens[:-1], fmt.response, 65, 66, fmt.eos]


def one_pass(pair, tokens, mel_fm):
    audio = jnp.asarray(pair.encode(mel_fm))[None]
    return one_pass_of(*nnx.split(pair.ours), jnp.asarray([tokens]), audio)[0]


@pytest.mark.parametrize("which, frames", [("pair", 120), ("pair", 103), ("offline", 523)])
def test_logits(which, frames, request):
    pair = request.getfixturevalue(which)
    tokens, mel = stream(pair.config, frames), pair.mel(1, frames)
    close(one_pass(pair, tokens, mel), reference.logits(pair.theirs, tokens, mel), 1e-4)


def test_logits_with_tied_embeddings_and_another_shape(tiny):
    shape = {"num_key_value_heads": 4, "rope_theta": 1e4, "tie_word_embeddings": True}
    pair = make_pair(tiny, {**shape, "hidden_size": 48, "head_dim": 20, "rms_norm_eps": 1e-5})
    tokens, mel = stream(pair.config, 80), pair.mel(1, 80)
    close(one_pass(pair, tokens, mel), reference.logits(pair.theirs, tokens, mel), 1e-4)


def test_rope_far_into_a_stream(pair):
    """Cosines at positions up to 32,767. Tolerance: one float32 rounding of an angle, 4e-3."""
    places = np.r_[:5, 600, 5000, 32_767]
    theirs = pair.theirs.model.language_model.rotary_emb(
        torch.zeros(1), torch.tensor(places).view(1, 1, -1).expand(3, 1, -1)
    )[0]
    ours = jnp.cos(rope_angles(jnp.asarray(places)[None], 12, pair.config.text.rope_theta))
    close(np.concatenate([ours] * 2, -1), theirs, 4e-3)


def test_prefill_and_decode_through_the_cache(pair):
    """Chunks, then tokens one at a time, in one batch with another stream: equal to one pass."""
    graphdef, state = nnx.split(pair.ours)
    clips = [pair.mel(1, 103), pair.mel(2, 80)]
    lines = [stream(pair.config, len(clip)) for clip in clips]
    theirs = [reference.logits(pair.theirs, *x) for x in zip(lines, clips, strict=True)]
    audio = [pair.encode(clip) for clip in clips]
    width = max(map(len, audio))
    audio_bnd = jnp.stack([np.pad(x, ((0, width - len(x)), (0, 0))) for x in audio])
    prefill = np.array([len(line) - 3 for line in lines])
    tokens = np.zeros((2, prefill.max()), int)
    for row, line in enumerate(lines):
        tokens[row, : prefill[row]] = line[:-3]
    cache = init_cache(pair.config.text, 2, 64)
    out, cache = extend(graphdef, state, cache, tokens, audio_bnd, jnp.asarray(prefill))
    for step in range(3):
        for row in range(2):
            close(out[row], theirs[row][prefill[row] - 1 + step], 1e-4)
        next_ = jnp.asarray([[line[len(line) - 3 + step]] for line in lines])
        out, cache = extend(graphdef, state, cache, next_, None, jnp.array([1, 1]))
    for row in range(2):
        close(out[row], theirs[row][-1], 1e-4)
