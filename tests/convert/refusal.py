"""Run ``ai-jax`` as it is typed, and check that what it refuses leaves no trace."""

import hashlib
import sys

from ai_jax import cli

_LARGE = 100_000_000  # such files are sparse here: their size and time stand for what they hold


def ai_jax(monkeypatch, capsys, *args):
    """Run the command in this process: (exit code, stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", ["ai-jax", *map(str, args)])
    code = 0
    try:
        cli.main()
    except SystemExit as e:
        code = e.code or 0
    return code, *capsys.readouterr()


def tree(folder):
    """All that lies in a folder, by path: links' targets, files' contents, folders."""

    def what(path):
        if path.is_symlink():
            return "link", str(path.readlink())
        if path.is_dir():
            return "folder", ""
        stat = path.stat()
        if stat.st_size > _LARGE:
            return "file", (stat.st_size, stat.st_mtime_ns)
        return "file", hashlib.sha256(path.read_bytes()).hexdigest()

    return {str(path.relative_to(folder)): what(path) for path in folder.rglob("*")}


def assert_one_sentence(code, out, err, *says):
    """Exit code 2 and one line that has all of ``says`` in this order."""
    assert (code, out) == (2, ""), (code, out, err)
    assert err.startswith("ai-jax: error: ") and err.count("\n") == 1, err
    rest = err
    for part in says:
        assert part in rest, (part, err)
        rest = rest.split(part, 1)[1]
