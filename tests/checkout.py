"""A copy of the present checkout, for actions that must not change the checkout itself."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_BUILT = (".venv", "build", "dist", ".*_cache", ".hypothesis", "__pycache__", "*.so")


def copy(to: Path) -> None:
    """Copy tracked files, and new files that git does not ignore; links stay links.

    An unpacked source distribution has no git: all of it is copied but what is built there.

    Args:
        to: A folder, made if it is missing.
    """
    if not (ROOT / ".git").exists():
        left_out = shutil.ignore_patterns(*_BUILT)
        shutil.copytree(ROOT, to, symlinks=True, ignore=left_out, dirs_exist_ok=True)
        return
    for name in names():
        if (source := ROOT / name).is_symlink() or source.exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, to / name, follow_symlinks=False)


def names() -> list[str]:
    """Return the paths of tracked files, and of new files that git does not ignore.

    In an unpacked source distribution it returns the paths of all files but what is built.
    """
    if not (ROOT / ".git").exists():
        with tempfile.TemporaryDirectory() as folder:
            copy(Path(folder))
            paths = [path.relative_to(folder) for path in Path(folder).rglob("*")]
        return [str(path) for path in paths]
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return [*filter(None, listed.stdout.decode().split("\0"))]


def sources(root: Path, suffixes: tuple[str, ...] = (".py", ".cc", ".h")) -> list[Path]:
    """Return the product's source files below a checkout, without tests and links."""
    floors = (root / name for name in ("collective", "backends"))
    return [
        file
        for floor in floors
        for file in sorted(floor.rglob("*"))
        if file.suffix in suffixes
        and not any(parent.is_symlink() for parent in file.parents)
    ]
