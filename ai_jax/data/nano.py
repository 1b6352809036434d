"""What the nano model knows, and how one of its training streams is drawn.

It answers twelve kinds of alarming sounds with a sentence each and thirty spoken words with the
word itself; it stays silent on everything else: benign sounds, running speech, quiet.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from ai_jax.data import augment, sounds
from ai_jax.data.compose import Event, Plan
from ai_jax.data.sounds.dsp import RATE
from ai_jax.data.sources import Material, Row, Split
from ai_jax.errors import UserError

Rng = np.random.Generator

ALERTS: dict[str, str] = {
    "smoke_alarm": "Smoke alarm! Check for fire and get everyone out.",
    "siren": "A siren is near. Make way for the emergency vehicle.",
    "car_horn": "A car is honking. Watch out for traffic.",
    "glass_break": "Glass just broke. Mind the splinters and check the windows.",
    "baby_cry": "The baby is crying. Please look after it.",
    "thunder": "Thunder. A storm is coming, so stay indoors.",
    "cough": "That cough sounds bad. Do you need some water?",
    "scream": "Someone is screaming. Find out whether they need help.",
    "dog_bark": "The dog is barking. Someone may be outside.",
    "knock": "Someone is knocking. Please answer the door.",
    "doorbell": "The doorbell rang. You have a visitor.",
    "explosion": "That was a bang. Take cover and stay away from it.",
}
BENIGN: tuple[str, ...] = tuple(label for label in sounds.SYNTHESIZED if label not in ALERTS)
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COMMANDS = (
    *("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go", "start", "pause"),
    *("play", "next", "back", "open", "close", "help", "louder", "quieter"),
)
WORDS = DIGITS + COMMANDS
SPEECH = "speech"
# Columns of the auxiliary target: which sound is heard in a chunk. Their order must not change.
LABELS: tuple[str, ...] = (*ALERTS, *BENIGN, SPEECH, *WORDS)

_AUDIOSET: dict[str, tuple[str, ...]] = {
    "smoke_alarm": ("Smoke detector, smoke alarm", "Fire alarm"),
    "siren": (
        *("Siren", "Civil defense siren", "Police car (siren)", "Ambulance (siren)"),
        *("Fire engine, fire truck (siren)", "Emergency vehicle"),
    ),
    "car_horn": ("Vehicle horn, car horn, honking", "Toot", "Air horn, truck horn"),
    "glass_break": ("Shatter",),
    "baby_cry": ("Baby cry, infant cry",),
    "thunder": ("Thunder", "Thunderstorm"),
    "cough": ("Cough",),
    "scream": ("Screaming",),
    "dog_bark": ("Dog", "Bark", "Bow-wow", "Yip"),
    "knock": ("Knock",),
    "doorbell": ("Doorbell", "Ding-dong"),
    "explosion": (
        *("Explosion", "Gunshot, gunfire", "Machine gun", "Fusillade", "Artillery fire"),
    ),
    "typing": ("Typing", "Typewriter", "Computer keyboard"),
    "footsteps": ("Walk, footsteps", "Run", "Shuffle"),
    "door": (
        *("Door", "Sliding door", "Slam", "Creak", "Squeak"),
        *("Cupboard open or close", "Drawer open or close"),
    ),
    "dishes": ("Dishes, pots, and pans", "Cutlery, silverware", "Chink, clink"),
    "clock": ("Clock", "Tick", "Tick-tock"),
    "applause": ("Applause", "Clapping", "Cheering", "Crowd", "Finger snapping"),
    "cat": ("Cat", "Meow", "Purr", "Caterwaul", "Hiss"),
    "animals": (
        *("Chicken, rooster", "Crowing, cock-a-doodle-doo", "Cluck", "Turkey", "Gobble"),
        *("Cattle, bovinae", "Moo", "Pig", "Oink", "Sheep", "Goat", "Bleat", "Horse"),
        *("Neigh, whinny", "Clip-clop", "Duck", "Quack", "Goose", "Honk", "Frog", "Croak"),
    ),
    "snoring": ("Snoring", "Breathing", "Snort"),
    "sneeze": ("Sneeze", "Sniff", "Throat clearing", "Burping, eructation", "Hiccup"),
    "laughter": ("Laughter", "Baby laughter", "Giggle", "Belly laugh", "Chuckle, chortle"),
    "chatter": (
        *("Chatter", "Hubbub, speech noise, speech babble", "Conversation", "Children playing"),
    ),
    "birds": (
        *("Bird", "Bird vocalization, bird call, bird song", "Chirp, tweet", "Pigeon, dove"),
        *("Coo", "Crow", "Caw", "Owl", "Hoot", "Squawk"),
    ),
    "insects": ("Insect", "Cricket", "Mosquito", "Fly, housefly", "Bee, wasp, etc."),
    "water": (
        *("Water", "Stream", "Drip", "Pour", "Trickle, dribble", "Gush", "Gurgling", "Waterfall"),
        *("Water tap, faucet", "Sink (filling or washing)", "Bathtub (filling or washing)"),
        *("Toilet flush", "Splash, splatter", "Ocean", "Waves, surf", "Fill (with liquid)"),
    ),
    "weather": ("Wind", "Wind noise (microphone)", "Rustling leaves", "Rain", "Rain on surface"),
    "fan": (
        *("Mechanical fan", "Air conditioning", "Hair dryer", "Vacuum cleaner", "Blender"),
        *("Sewing machine", "Microwave oven"),
    ),
    "engine": (
        *("Engine", "Idling", "Vehicle", "Car", "Car passing by", "Truck", "Bus", "Motorcycle"),
        *("Traffic noise, roadway noise", "Boat, Water vehicle", "Train", "Rail transport"),
        *("Helicopter", "Aircraft", "Airplane", "Jet engine", "Fixed-wing aircraft, airplane"),
    ),
    "music": ("Music", "Musical instrument", "Singing"),
    "church_bell": ("Church bell", "Bell", "Gong", "Tubular bells", "Chime", "Bicycle bell"),
    "phone_tones": ("Dial tone", "Busy signal", "Telephone dialing, DTMF"),
}
_LABEL_OF = {name: label for label, names in _AUDIOSET.items() for name in names}

# An alert is answered so long after its onset, or so long after its end if that is earlier.
_ANSWER_AFTER, _QUIET_AFTER = 1.6, 0.2
_WORD_QUIET = 0.15
# Running speech shorter than this could pass for a word.
_MIN_SPEECH = 1.2


def label_of(names: Sequence[str], kind: str) -> str | None:
    """Our label of a clip with these AudioSet ``names``; ``kind`` is that of a material's row.

    None: names that we do not know or that could be taken for an alert as well as for a benign
    sound (a ringing telephone, a growl, fireworks); such clips are used neither way.
    """
    if kind in ("speech", "music"):
        return SPEECH if kind == "speech" else "music"
    found = {_LABEL_OF[name] for name in names if name in _LABEL_OF}
    return found.pop() if len(found) == 1 else None


def plan(material: Material, split: Split, rng: Rng, seconds: float = 24.0) -> Plan:
    """Draw what one stream of about ``seconds`` is made of; a pure function of its arguments.

    Foreground: alerts, benign sounds, words (a few, or a dense run of them), running speech and
    gaps. Classes are drawn uniformly, then recording or synthesis, then the file. Streams of "val"
    and "test" hold only recordings of that split, hence only the classes that it has.
    """
    clips = _clips(material, split)
    events: list[Event] = [_gap(rng, 0.1, 1.0)]
    dense_at = rng.uniform(0, 0.6) * seconds if clips.words and rng.random() < 0.4 else np.inf
    length, last = 0.0, ""
    while length < seconds:
        if length >= dense_at:
            new, dense_at = clips.words_in_a_row(rng, int(rng.integers(8, 15))), np.inf
        else:
            new = clips.draw(rng, last)
        last = new[0].label
        new.append(_gap(rng, 0.1, 1.6))
        events += new
        length = sum(len(event.audio) for event in events) / RATE
    events += clips.behind(rng)
    return Plan(events, clips.noise(rng, events_like=True), clips.noise(rng, events_like=False))


def demo_plan(rng: Rng, words: Sequence[tuple[str, np.ndarray]] = ()) -> Plan:
    """About 30 s for showing the model: five alerts and four benign sounds, all synthesised.

    words: spoken (text, audio [samples] at 16 kHz) to put in between. Pass a generator of another
    kind or seed than the one that training used, or the model may have heard these very sounds.
    """
    alerts = [str(x) for x in rng.permutation(list(ALERTS))[:5]]
    benign = [str(x) for x in rng.permutation(BENIGN)[:4]]
    sequence = [x for pair in zip(alerts, [*benign, None], strict=True) for x in pair if x]
    events = [_gap(rng, 0.6, 0.8)]
    spoken = list(words)
    for i, label in enumerate(sequence):
        audio = sounds.synthesize(label, rng)
        audio = 0.7 * augment.excerpt(audio, rng.uniform(1.8, 2.6), rng)
        events += [_event(label, audio), _gap(rng, 0.5, 0.8)]
        share = len(words) * (i + 1) // len(sequence)
        while spoken and len(words) - len(spoken) < share:
            text, audio = spoken.pop(0)
            events += [_word(text, audio.astype(np.float32)), _gap(rng, 0.6, 0.9)]
    return Plan(events, (), [sounds.background(rng, 10.0)])


class _Clips:
    """The rows of one split by label, and how events are drawn from them."""

    def __init__(self, material: Material, split: Split) -> None:
        self.material = material
        self.real: dict[str, list[Row]] = {}
        self.words: dict[str, list[Row]] = {}
        self.noises: list[Row] = []
        for row in material.rows(split=split):
            text = row.text.lower().strip(" .,!?")
            if row.kind == "word" and text in WORDS:
                self.words.setdefault(text, []).append(row)
                continue
            label = SPEECH if row.kind == "word" else label_of(row.labels, row.kind)
            if row.kind == "speech" and (text in WORDS or row.duration_s < _MIN_SPEECH):
                continue
            if label:
                self.real.setdefault(label, []).append(row)
            if row.kind == "noise" and label not in ALERTS:
                self.noises.append(row)
        self.synthesis = split == "train"
        self.alerts = [x for x in ALERTS if self.synthesis or x in self.real]
        self.benign = [x for x in BENIGN if self.synthesis or x in self.real]
        kinds = {
            "alert": (0.38, self.alerts),
            "benign": (0.32, self.benign),
            "words": (0.16, self.words),
            "speech": (0.1, self.real.get(SPEECH)),
            "quiet": (0.04, True),
        }
        self.kinds = {name: weight for name, (weight, there) in kinds.items() if there}

    def draw(self, rng: Rng, last: str) -> list[Event]:
        """The next foreground events; an alert never follows one of its own kind, as one alarm
        that pauses is not to be answered twice."""
        weights = np.array(list(self.kinds.values()))
        kind = str(rng.choice(list(self.kinds), p=weights / weights.sum()))
        if kind == "words":
            return self.words_in_a_row(rng, int(rng.integers(1, 4)))
        if kind == "quiet":
            return [_gap(rng, 1.5, 4.0)]
        if kind == "speech":
            return [Event(self._recording(SPEECH, rng), label=SPEECH)]
        labels = self.benign if kind == "benign" else [x for x in self.alerts if x != last]
        labels = labels or self.alerts
        label = labels[int(rng.integers(len(labels)))]
        return [_event(label, self.sound(label, rng))]

    def sound(self, label: str, rng: Rng) -> np.ndarray:
        """A varied recording or synthesis of ``label``; few recordings are used less often.

        Benign sounds take more recordings: a poor imitation of one could resemble an alert.
        """
        count = len(self.real.get(label, ()))
        most, half = (0.5, 4) if label in ALERTS else (0.8, 1)
        share = min(most, count / (count + half)) if self.synthesis else 1.0
        if rng.random() < share:
            return self._recording(label, rng)
        audio = augment.excerpt(sounds.synthesize(label, rng), rng.uniform(1.5, 6.0), rng)
        return augment.augment(audio, rng, placed=True)

    def _recording(self, label: str, rng: Rng) -> np.ndarray:
        rows = self.real[label]
        audio = self.material.read(rows[int(rng.integers(len(rows)))])
        return augment.augment(augment.excerpt(audio, rng.uniform(1.5, 6.0), rng), rng)

    def words_in_a_row(self, rng: Rng, count: int) -> list[Event]:
        events: list[Event] = []
        texts = list(self.words)
        for _ in range(count):
            text = texts[int(rng.integers(len(texts)))]
            rows = self.words[text]
            audio = self.material.read(rows[int(rng.integers(len(rows)))])
            audio = augment.augment(audio, rng, speed=(0.9, 1.1), gain_db=(-12, 0))
            events += [_word(text, audio), _gap(rng, 0.05, 0.5)]
        return events

    def behind(self, rng: Rng) -> list[Event]:
        """Benign sounds that go on behind the foreground."""
        if not self.benign:
            return []
        labels = [self.benign[i] for i in rng.integers(len(self.benign), size=rng.integers(0, 3))]
        roles = rng.choice(["background", "ambient"], len(labels))
        return [
            Event(self.sound(label, rng), str(role), label=label)
            for label, role in zip(labels, roles, strict=True)
        ]

    def noise(self, rng: Rng, *, events_like: bool) -> list[np.ndarray]:
        """Clips of one noise track: recorded noise, music, steady sounds or a synthetic bed."""
        if rng.random() < (0.5 if events_like else 0.2):
            return []
        draw = rng.random()
        if self.noises and draw < 0.4:
            row = self.noises[int(rng.integers(len(self.noises)))]
            return [self.material.read(row)]
        steady = [x for x in ("music", "chatter", "engine", "fan", "weather") if x in self.benign]
        if events_like and steady:
            return [self.sound(steady[int(rng.integers(len(steady)))], rng)]
        return [sounds.background(rng, 10.0)]


@functools.lru_cache(maxsize=8)
def _clips(material: Material, split: Split) -> _Clips:
    clips = _Clips(material, split)
    if not (clips.alerts or clips.benign or clips.words):
        raise UserError(f"the material holds no usable clips of the split '{split}'")
    return clips


def _gap(rng: Rng, low: float, high: float) -> Event:
    return Event(np.zeros(round(rng.uniform(low, high) * RATE), np.float32))


def _event(label: str, audio: np.ndarray) -> Event:
    """Foreground sound of a class, answered if it is an alert."""
    if label not in ALERTS:
        return Event(audio, label=label)
    start, end = augment.active_span(audio)
    return _answered(audio, min(start + _ANSWER_AFTER, end + _QUIET_AFTER), ALERTS[label], label)


def _word(text: str, audio: np.ndarray) -> Event:
    end = augment.active_span(audio)[1]
    return _answered(audio[: round((end + 0.2) * RATE)], end + _WORD_QUIET, text, text)


def _answered(audio: np.ndarray, trigger: float, response: str, label: str) -> Event:
    """The event, lengthened by quiet where its answer is due after its end."""
    missing = int(np.ceil(trigger * RATE)) - len(audio)
    if missing > 0:
        audio = np.pad(audio, (0, missing))
    return Event(audio, trigger=trigger, response=response, label=label)
