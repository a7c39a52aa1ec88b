"""Where this package was installed from: which commands and pages hints may name."""

from __future__ import annotations

import functools
import re
from importlib import metadata
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
CHECKOUT = (_ROOT / "Makefile").is_file() and (_ROOT / "pyproject.toml").is_file()
_PAGE = re.compile(r"\bdocs/[\w/-]+\.md\b")


def make_command(target: str, otherwise: str) -> str:
    """Return ``make target`` in a checkout, else the other text."""
    return f"make {target}" if CHECKOUT else otherwise


def with_addresses(text: str) -> str:
    """Return a text in which each page of docs/ has its address; a wheel has no such files."""
    if CHECKOUT or not _PAGE.search(text):
        return text
    return _PAGE.sub(lambda page: f"{_published()}{page[0]}", text)


@functools.cache
def _published() -> str:
    """Return the address of this version's files; '' if the wheel does not name it."""
    try:
        about = metadata.metadata("keras-collective")
    except metadata.PackageNotFoundError:
        return ""
    for entry in about.get_all("Project-URL") or []:
        name, _, url = entry.partition(", ")
        if name == "Source":
            return f"{url}/blob/v{about['Version']}/"
    return ""
