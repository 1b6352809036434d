"""The parts of a model, by which reports sum up its tensors."""

from __future__ import annotations

_PREFIXES = {
    "audio layers": "audio_tower.layers.",
    "audio, other": "audio_tower.",
    "embedding": "model.embed_tokens.",
    "decoder layers": "model.layers.",
    "final norm": "model.norm.",
    "lm_head": "lm_head.",
    "vision": "visual.",
    "talker": "talker.",
    "token2wav": "token2wav.",
}
OTHER = "other"
GROUPS = (*_PREFIXES, OTHER)


def group_of(name: str) -> str:
    """The part of the model that the tensor ``name`` (without ``thinker.``) belongs to."""
    return next((part for part, start in _PREFIXES.items() if name.startswith(start)), OTHER)
