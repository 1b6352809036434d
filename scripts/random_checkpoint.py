"""Write a model folder with random weights in the form of the published checkpoint.

    python scripts/random_checkpoint.py OUT                       # 3B with vision: 9.4 GB
    python scripts/random_checkpoint.py OUT --layers 2 --no-vision # 2.8 GB

For trying conversion, loading and memory at full size without the real weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from ai_jax.config import ModelConfig, preset
from ai_jax.convert.synthetic import VISION, write_random_folder
from ai_jax.errors import UserError


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--model", default="qwen2_5_omni_3b", help="preset of configs/model")
    parser.add_argument("--layers", type=int, help="decoder layers, in place of the preset's")
    parser.add_argument("--no-vision", action="store_true", help="leave the vision tower out")
    parser.add_argument("--shard-gb", type=float, default=5.0, help="largest shard in GB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overwrite", action="store_true")
    args = parser.parse_args()
    try:
        config = preset("model", args.model, ModelConfig)
        if (args.layers is not None and args.layers < 1) or args.shard_gb <= 0:
            raise UserError("--layers and --shard-gb must be above zero; give larger ones")
        if args.layers:
            text = dataclasses.replace(config.text, num_hidden_layers=args.layers)
            config = dataclasses.replace(config, text=text)
        summary = write_random_folder(
            config,
            args.out,
            vision=None if args.no_vision else VISION,
            seed=args.seed,
            shard_bytes=int(args.shard_gb * 1e9),
            overwrite=args.overwrite,
        )
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
    print(f"{args.out}: {summary.tensors} tensors, {summary.bytes / 1e6:,.1f} MB")


if __name__ == "__main__":
    main()
