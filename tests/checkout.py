"""A copy of the present checkout, for actions that must not change the checkout itself."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def copy(to: Path) -> None:
    """Copy tracked files, and new files that git does not ignore; links stay links.

    Args:
        to: A folder, made if it is missing.

    Raises:
        subprocess.CalledProcessError: If this is not a checkout.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (source := ROOT / name).is_symlink() or source.exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, to / name, follow_symlinks=False)


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
