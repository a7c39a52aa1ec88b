"""``--keras``: the command is a Keras script that knows of no ranks."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from collective.errors import UsageError

EXAMPLE = "collectiverun -np 4 --keras script.py"
_PROGRAM = ["-m", "collective.distribute"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The group that ``--help`` shows."""
    add = parser.add_argument_group("an unedited Keras script").add_argument
    add("--keras", action="store_true",
        help="the command is script.py: its fit, evaluate and predict run on all ranks")  # fmt: skip
    add("--backend", metavar="NAME", help="who sums the gradients (default: auto)")
    add("--output", choices=("rank0", "all"),
        help="whose standard output is shown (default: rank0)")  # fmt: skip


def check(parsed: argparse.Namespace) -> None:
    """Refuses what cannot go together.

    Raises:
        UsageError: Says what.
    """
    if not parsed.keras:
        for option in ("backend", "output"):
            if getattr(parsed, option):
                raise UsageError(
                    f"--{option} goes with --keras; the command takes options of its "
                    "own behind it",
                    hint=EXAMPLE,
                )
        return
    if parsed.min_np or parsed.max_np or parsed.host_discovery_script:
        raise UsageError(
            "--keras with --min-np, --max-np or --host-discovery-script: a rank that "
            "joins or continues would be at another place of the script",
            hint="leave them out, or call collective.fit in the script "
            "(docs/how-to/elastic.md)",
        )
    words = parsed.command
    of_python = "".join(words[1:2])[:1] in ("", "-") and words[1:2] != ["-m"]
    if _is_python(words[0]) and of_python:
        raise UsageError(
            f"--keras takes a script, not {' '.join(words[:2])!r}", hint=EXAMPLE
        )


def command(parsed: argparse.Namespace) -> list[str]:
    """What each rank runs; a ``python`` in front of the script is left as it is."""
    words = list(parsed.command)
    python = words.pop(0) if _is_python(words[0]) else sys.executable
    options = []
    if parsed.backend:
        options += ["--backend", parsed.backend]
    # Each rank has files of its own then.
    output = "all" if parsed.output_filename else parsed.output
    if output:
        options += ["--output", output]
    return [python, *_PROGRAM, *options, *words]


def _is_python(word: str) -> bool:
    return re.fullmatch(r"python[\d.]*", Path(word).name) is not None
