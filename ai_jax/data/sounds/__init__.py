"""Procedural sounds: what the nano model learns from besides recordings, and what its demo plays.

``synthesize(label, rng)`` draws one sound. Pitch, pace, timbre, distance, room and microphone are
drawn anew each time, widely, because a model should learn what is common to a class rather than
one setting of a generator.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ai_jax.data.sounds import alarms, impacts, music, surroundings, voices
from ai_jax.data.sounds.dsp import RATE, Rng, filtered, high_pass, place
from ai_jax.errors import UserError

_RECIPES = {
    "smoke_alarm": alarms.smoke_alarm,
    "siren": alarms.siren,
    "car_horn": alarms.car_horn,
    "doorbell": alarms.doorbell,
    "glass_break": impacts.glass_break,
    "knock": impacts.knock,
    "explosion": impacts.explosion,
    "thunder": impacts.thunder,
    "baby_cry": voices.baby_cry,
    "cough": voices.cough,
    "scream": voices.scream,
    "dog_bark": voices.dog_bark,
    "typing": impacts.typing,
    "footsteps": impacts.footsteps,
    "door": impacts.door,
    "dishes": impacts.dishes,
    "clock": impacts.clock,
    "applause": impacts.applause,
    "cat": voices.cat,
    "animals": voices.animals,
    "snoring": voices.snoring,
    "sneeze": voices.sneeze,
    "laughter": voices.laughter,
    "chatter": voices.chatter,
    "birds": surroundings.birds,
    "insects": surroundings.insects,
    "water": surroundings.water,
    "weather": surroundings.weather,
    "fan": surroundings.fan,
    "engine": surroundings.engine,
    "music": music.music,
    "church_bell": music.church_bell,
    "phone_tones": alarms.phone_tones,
}
_OUTDOORS = {"siren", "car_horn", "thunder", "explosion", "birds", "insects", "weather", "engine"}
_OUTDOORS |= {"church_bell", "scream"}

SYNTHESIZED = tuple(_RECIPES)
MIN_SECONDS, MAX_SECONDS = 0.2, 8.0


def synthesize(label: str, rng: Rng) -> NDArray[np.float32]:
    """One sound of class ``label``: float32 [samples], 16 kHz, peak 0.99, 0.2-8 s.

    The result is a pure function of ``label`` and the state of ``rng``. Raises UserError for a
    label that is not in ``SYNTHESIZED``.
    """
    if label not in _RECIPES:
        raise UserError(f"no recipe for the sound '{label}'; known: {', '.join(SYNTHESIZED)}")
    x = _RECIPES[label](rng)
    x = place(rng, x, outdoors=0.9 if label in _OUTDOORS else 0.15)
    return _normalised(x[: int(MAX_SECONDS * RATE)])


def background(rng: Rng, seconds: float) -> NDArray[np.float32]:
    """A bed of coloured noise, hum or room tone: float32 [samples], 16 kHz, peak 0.99."""
    return _normalised(surroundings.bed(rng, seconds))


def _normalised(x: NDArray[np.floating]) -> NDArray[np.float32]:
    x = filtered(x, high_pass(20))  # no DC
    short = int(MIN_SECONDS * RATE) - len(x)
    if short > 0:
        x = np.pad(x, (0, short))
    return (0.99 * x / max(float(np.abs(x).max()), 1e-9)).astype(np.float32)
