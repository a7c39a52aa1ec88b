"""Whether this package is used from a checkout: which commands a hint may name."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
CHECKOUT = (_ROOT / "Makefile").is_file() and (_ROOT / "pyproject.toml").is_file()


def make_command(target: str, otherwise: str) -> str:
    """Return ``make target`` in a checkout, else the other text."""
    return f"make {target}" if CHECKOUT else otherwise
