"""The decoder's memory: keys and values of the tokens read so far, in buffers of fixed size."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ai_jax.config import TextConfig
from ai_jax.errors import UserError
from ai_jax.kernels.xla import rotate
from ai_jax.model.layers import DType, rope_angles, rope_positions


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys (rotated) and values of each layer, [b, k, s, head_dim], and tokens held, int32 [b].

    A token's position is its place in the buffer. One pair of arrays for each layer: a donated
    array is updated in place, a slice of a stack would be copied.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    length_b: jax.Array

    @property
    def max_len(self) -> int:
        return self.k[0].shape[2]


def init_cache(config: TextConfig, batch: int, max_len: int, dtype: DType = jnp.float32) -> KVCache:
    """An empty cache for ``batch`` sessions of at most ``max_len`` tokens.

    dtype: of the buffers; on CPU they are float32 whatever it says, because XLA:CPU would convert
    the whole of a bfloat16 buffer to float32 and back for each update.
    Raises UserError where positions would leave the range that the model was trained on.
    """
    if not 0 < max_len <= config.max_position_embeddings:
        raise UserError(
            f"max_len must lie between 1 and max_position_embeddings = "
            f"{config.max_position_embeddings} (got {max_len})"
        )
    if jax.default_backend() == "cpu":
        dtype = jnp.float32
    shape = (batch, config.num_key_value_heads, max_len, config.head_dim)

    def buffers() -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_hidden_layers))

    return KVCache(k=buffers(), v=buffers(), length_b=jnp.zeros(batch, jnp.int32))


def slide(config: TextConfig, cache: KVCache, prefix_b: jax.Array, drop_b: jax.Array) -> KVCache:
    """Forget ``drop_b`` tokens that follow the first ``prefix_b``, in each row (0: nothing).

    The tokens behind them move forward to the freed places, and their keys are turned to their new
    positions, so positions stay below ``max_len`` however long a stream runs. ``prefix_b + drop_b``
    must not exceed ``length_b``. Sizes are arrays, so one compilation serves all of them.
    """
    place_s = jnp.arange(cache.max_len)
    shift_bs = jnp.where(place_s >= prefix_b[:, None], drop_b[:, None], 0)
    source_bs = jnp.minimum(place_s + shift_bs, cache.max_len - 1)
    # Rounded positions are not all apart what their places are, so the turn is their difference.
    old_bs, new_s = (rope_positions(x, config.fp16_positions) for x in (source_bs, place_s))
    angle_bsr = rope_angles(new_s - old_bs, config.head_dim, config.rope_theta)
    cos, sin = jnp.cos(angle_bsr)[:, None], jnp.sin(angle_bsr)[:, None]

    def move(buffer_bksd):
        return jnp.take_along_axis(buffer_bksd, source_bs[:, None, :, None], axis=2)

    def move_keys(k_bksd):
        return rotate(move(k_bksd).astype(jnp.float32), cos, sin).astype(k_bksd.dtype)

    return KVCache(
        k=tuple(map(move_keys, cache.k)),
        v=tuple(map(move, cache.v)),
        length_b=cache.length_b - drop_b,
    )
