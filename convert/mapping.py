"""The one invertible table between Hugging Face's tensors and ours.

Our names are Hugging Face's without the prefix ``thinker.`` (which a folder that holds the thinker
alone lacks), and the layout is the same ``[out, in]``, so the table is the identity plus a prefix.
What is not the identity is knowing which tensors a model of a given size must have, which others
may come along, and that there are no more.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping

from ai_jax.config import AudioConfig, ModelConfig, TextConfig
from ai_jax.errors import UserError

Shape = tuple[int, ...]

PREFIX = "thinker."
# Parts of the full Qwen2.5-Omni model beside the thinker, and the thinker's part that a model which
# listens does not have. They are carried through a conversion so that it can be undone.
OTHER_MODELS = ("talker.", "token2wav.")
VISION = "visual."
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
# What can be left behind: name of the part -> how its tensors' names begin (without ``thinker.``).
PARTS = {"vision": (VISION,), "talker": OTHER_MODELS}


@dataclasses.dataclass(frozen=True)
class Partition:
    """What the tensors of a Hugging Face folder are to us.

    prefix: ``"thinker."`` or ``""``. params: our name -> the folder's name, for every tensor that
    the model runs. carried: the folder's names of the tensors that only travel along.
    """

    prefix: str
    params: dict[str, str]
    carried: tuple[str, ...]


def expected(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor of the model: our name -> shape (torch layout ``[out, in]``)."""
    text = _text(config.text)
    audio = _audio(config.audio)
    return {f"audio_tower.{k}": v for k, v in audio.items()} | text


def to_hf(name: str, prefix: str) -> str:
    """The Hugging Face name of our tensor ``name``; only the thinker's have the prefix."""
    return name if name.startswith(OTHER_MODELS) else prefix + name


def to_ours(hf_name: str, prefix: str) -> str:
    """The inverse of ``to_hf``."""
    return hf_name.removeprefix(prefix)


def partition(config: ModelConfig, shapes: Mapping[str, Shape], where: object) -> Partition:
    """Match a folder's tensors (name -> shape) with the model's.

    Raises UserError that names the tensor if one has no place in the model, is missing or has
    another shape than ``config`` asks for; ``where`` names the folder in the message.
    """
    prefix = _prefix(shapes)
    want = expected(config)
    params: dict[str, str] = {}
    carried: list[str] = []
    unmapped: list[str] = []
    for name in shapes:
        ours = to_ours(name, prefix)
        if to_hf(ours, prefix) != name:
            unmapped.append(name)
        elif ours in want:
            params[ours] = name
        elif _is_carried(ours, config):
            carried.append(name)
        else:
            unmapped.append(name)
    if unmapped:
        close = difflib.get_close_matches(unmapped[0], [to_hf(k, prefix) for k in want], n=1)
        hint = f"; the nearest one that the model has is '{close[0]}'" if close else ""
        raise UserError(
            f"{where}: the tensor '{unmapped[0]}'{_more(unmapped)} has no place in this model"
            f"{hint}. Remove it, or correct the sizes and layer counts in the folder's config"
        )
    missing = [to_hf(name, prefix) for name in want if name not in params]
    if missing:
        raise UserError(
            f"{where}: the tensor '{missing[0]}'{_more(missing)} is missing. "
            + (
                "Download the folder again, or set tie_word_embeddings to true in its config if "
                "embedding and head are one"
                if missing == [to_hf("lm_head.weight", prefix)]
                else "Download the folder again, or correct the layer counts in its config"
            )
        )
    for ours, name in params.items():
        if tuple(shapes[name]) != want[ours]:
            raise _misshapen(name, tuple(shapes[name]), want[ours], config, where)
    return Partition(prefix, params, tuple(carried))


def _misshapen(name: str, got: Shape, want: Shape, config: ModelConfig, where: object) -> UserError:
    text = (
        f"{where}: the tensor '{name}' has shape {list(got)}, but the config asks for {list(want)}"
    )
    rows = got[:1] != want[:1] and got[1:] == want[1:]
    if rows and name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return UserError(
            f"{text}. Somebody resized the vocabulary: resize it to {want[0]} rows "
            "(resize_token_embeddings), or take the original checkpoint"
        )
    return UserError(
        f"{text}. Weights and config belong to models of different sizes: put the config of these "
        "weights beside them"
    )


def _prefix(names: Iterable[str]) -> str:
    """By majority, so that a stray name is the one complained about."""
    prefixed = [name.startswith(PREFIX) for name in names if not name.startswith(OTHER_MODELS)]
    return PREFIX if 2 * sum(prefixed) > len(prefixed) else ""


def _is_carried(ours: str, config: ModelConfig) -> bool:
    # With tied embeddings a folder may still hold the head that nobody reads.
    tied_head = ours == HEAD and config.text.tie_word_embeddings
    return ours.startswith((VISION, *OTHER_MODELS)) or tied_head


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _audio(c: AudioConfig) -> dict[str, Shape]:
    d = c.d_model
    shapes: dict[str, Shape] = {
        "conv1.weight": (d, c.num_mel_bins, 3),
        "conv1.bias": (d,),
        "conv2.weight": (d, d, 3),
        "conv2.bias": (d,),
        "audio_bos_eos_token.weight": (2, c.output_dim),
    }
    for i in range(c.encoder_layers):
        layer = (
            norm("self_attn_layer_norm", d)
            | linear("self_attn.q_proj", d, d)
            | {"self_attn.k_proj.weight": (d, d)}
            | linear("self_attn.v_proj", d, d)
            | linear("self_attn.out_proj", d, d)
            | norm("final_layer_norm", d)
            | linear("fc1", c.encoder_ffn_dim, d)
            | linear("fc2", d, c.encoder_ffn_dim)
        )
        shapes |= {f"layers.{i}.{k}": v for k, v in layer.items()}
    return shapes | norm("ln_post", d) | linear("proj", c.output_dim, d)


def _text(c: TextConfig) -> dict[str, Shape]:
    d, ffn = c.hidden_size, c.intermediate_size
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (c.vocab_size, d)}
    for i in range(c.num_hidden_layers):
        layer = (
            {"input_layernorm.weight": (d,)}
            | linear("self_attn.q_proj", q, d)
            | linear("self_attn.k_proj", kv, d)
            | linear("self_attn.v_proj", kv, d)
            | {"self_attn.o_proj.weight": (d, q)}
            | {"post_attention_layernorm.weight": (d,)}
            | {"mlp.gate_proj.weight": (ffn, d), "mlp.up_proj.weight": (ffn, d)}
            | {"mlp.down_proj.weight": (d, ffn)}
        )
        shapes |= {f"model.layers.{i}.{k}": v for k, v in layer.items()}
    shapes["model.norm.weight"] = (d,)
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, d)
    return shapes


def linear(name: str, rows: int, columns: int) -> dict[str, Shape]:
    """Weight and bias of a linear map."""
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def norm(name: str, width: int) -> dict[str, Shape]:
    """Weight and bias of a LayerNorm."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}
