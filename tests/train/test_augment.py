"""SpecAugment: what it masks, with what, and that it depends on the key alone."""

import jax
import numpy as np

from ai_jax.train.augment import spec_augment
from ai_jax.train.stages import SpecAugmentConfig

MEL = np.random.default_rng(0).normal(size=(4, 3, 40, 16)).astype(np.float32)


def masked(config, seed=0):
    out = np.asarray(spec_augment(MEL, jax.random.key(seed), config))
    return out, out != MEL


def test_off_changes_nothing():
    assert spec_augment(MEL, jax.random.key(0), SpecAugmentConfig()) is MEL


def test_masks_are_bands_and_spans_of_the_stream_filled_with_its_mean():
    config = SpecAugmentConfig(time_masks=1, time_width=30, mel_masks=1, mel_width=6)
    widths = set()
    for seed in range(20):
        out, changed = masked(config, seed)
        for row in range(4):
            flat = changed[row].reshape(120, 16)
            frames, mels = flat.all(1), flat.all(0)
            # Exactly the union of whole frames and whole bins, each one span.
            np.testing.assert_array_equal(flat, frames[:, None] | mels[None])
            for span, width in ((frames, 30), (mels, 6)):
                where = np.flatnonzero(span)
                assert len(where) <= width
                assert len(where) == 0 or where[-1] - where[0] == len(where) - 1
            widths.add(int(frames.sum()))
            values = out[row][changed[row]]
            np.testing.assert_allclose(values, MEL[row].mean(), atol=1e-6)
    assert len(widths) > 10


def test_the_key_decides():
    config = SpecAugmentConfig(time_masks=2, mel_masks=2)
    np.testing.assert_array_equal(masked(config, 1)[0], masked(config, 1)[0])
    assert (masked(config, 1)[0] != masked(config, 2)[0]).any()
