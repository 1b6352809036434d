"""How arguments read in --help; those without a default are described in words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

Folder = Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")]
File = Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")]
Probability = Annotated[float | None, arg(metavar="P", help_behavior_hint="")]
InFolder = Annotated[Positional[Path], arg(metavar="DIR", help_behavior_hint="")]
OutFolder = Annotated[Positional[Path], arg(metavar="OUT", help_behavior_hint="")]

Dtype = Annotated[Literal["float32", "float16", "bfloat16"] | None, arg(help_behavior_hint="")]
Parts = Annotated[str, arg(metavar="PART,...", help_behavior_hint="")]
