"""How weights are laid out over a mesh: logical axes of each weight, and one table of rules."""

from __future__ import annotations

from collections.abc import Mapping

from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# Logical axis -> axis of the mesh. What the mesh lacks, or what does not divide, is not split.
RULES = {"vocab": "tensor", "heads": "tensor", "mlp": "tensor", "embed": "fsdp"}

# The logical axes of a weight, by the end of its name; others (norms, biases of the width) are
# whole everywhere.
_AXES: dict[str, tuple[str | None, ...]] = {
    "embed_tokens.weight": ("vocab", "embed"),
    "lm_head.weight": ("vocab", "embed"),
    "q_proj.weight": ("heads", "embed"),
    "k_proj.weight": ("heads", "embed"),
    "v_proj.weight": ("heads", "embed"),
    "q_proj.bias": ("heads",),
    "k_proj.bias": ("heads",),
    "v_proj.bias": ("heads",),
    "o_proj.weight": ("embed", "heads"),
    "out_proj.weight": ("embed", "heads"),
    "gate_proj.weight": ("mlp", "embed"),
    "up_proj.weight": ("mlp", "embed"),
    "down_proj.weight": ("embed", "mlp"),
    "fc1.weight": ("mlp", "embed"),
    "fc1.bias": ("mlp",),
    "fc2.weight": ("embed", "mlp"),
    "conv1.weight": ("embed", None, None),
    "conv2.weight": ("embed", None, None),
    "audio_tower.proj.weight": ("embed", None),
}


def spec(name: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    """How the weight ``name`` (Hugging Face's name) of this shape is split over ``mesh``."""
    end = ".".join(name.split(".")[-2:])
    logical = _AXES.get(name) or _AXES.get(end) or (None,) * len(shape)

    def axis(logical: str | None, size: int) -> str | None:
        name = RULES.get(logical)
        return name if name in mesh.shape and size % mesh.shape[name] == 0 else None

    return P(*map(axis, logical, shape))


def shardings(shapes: Mapping[str, tuple[int, ...]], mesh: Mesh) -> dict[str, NamedSharding]:
    """The sharding of each weight over ``mesh``, whose axes may be "fsdp" and "tensor"."""
    return {name: NamedSharding(mesh, spec(name, shape, mesh)) for name, shape in shapes.items()}
