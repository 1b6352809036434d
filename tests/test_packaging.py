"""What is in the tree is in the wheel."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def folder(package: str) -> Path:
    """Where a package lies, by the longest matching entry of package-dir."""
    mapping = SETUP["package-dir"]
    top = max((p for p in mapping if f"{package}.".startswith(f"{p}.")), key=len)
    return ROOT / mapping[top] / package[len(top) :].strip(".").replace(".", "/")


def test_every_folder_with_python_is_packaged():
    packaged = {folder(p) for p in SETUP["packages"]}
    for top in ("ai_jax", "convert"):
        for file in (ROOT / top).rglob("*.py"):
            assert file.parent in packaged, f"{file.parent} is missing in tool.setuptools.packages"
    assert all(p.is_dir() for p in packaged)


def test_every_preset_and_asset_is_packaged():
    patterns = SETUP["package-data"]
    covered = {f for p, globs in patterns.items() for g in globs for f in folder(p).glob(g)}
    for top in ("configs", "ai_jax/assets"):
        for file in (ROOT / top).rglob("*"):
            if file.is_file() and file.suffix not in (".py", ".pyc"):
                assert file in covered, f"{file} is missing in tool.setuptools.package-data"
