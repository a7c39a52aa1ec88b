"""The parser of our command lines: help in 80 columns, errors with a HINT."""

from __future__ import annotations

import argparse
import difflib
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any, NoReturn

_COLUMNS = 80
_UNKNOWN = "unrecognized arguments: "
# Commands that are installed with Python, each for ``python -m`` of a module.
_INSTALLED = ("collectiverun", "horovodrun")


def program(otherwise: str) -> str:
    """Return the name that the user typed, if an installed command has it."""
    typed = Path(sys.argv[0]).name
    return typed if typed in _INSTALLED else otherwise


class Parser(argparse.ArgumentParser):
    """Python's parser; it keeps the lines of descriptions and wraps long options."""

    whose = "error"  # the first word of an error

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **{"formatter_class": _Lines, **named})
        self.help_command = f"{self.prog} --help"  #  the command that shows the help

    def error(self, message: str) -> NoReturn:
        """Print the message and a HINT, and end the program with 2."""
        message, _, given = message.partition("\nHINT: ")
        hint = given or self.help_command
        if meant := self._meant(message):
            hint = f"did you mean {meant}? {hint} shows all options"
        self.exit(2, f"{self.whose}: {message}\nHINT: {hint}\n")

    def _meant(self, message: str) -> str:
        """Return the options nearest to those that the message says are unknown."""
        if not message.startswith(_UNKNOWN):
            return ""
        known = [
            name
            for name, action in self._option_string_actions.items()
            if action.help != argparse.SUPPRESS
        ]
        words = message.removeprefix(_UNKNOWN).split()
        options = [w.partition("=")[0] for w in words if w.startswith("-")]
        found = [difflib.get_close_matches(name, known, n=1) for name in options]
        return ", ".join(dict.fromkeys(name for names in found for name in names))


class _Lines(argparse.RawDescriptionHelpFormatter):
    """Keeps lines as they are written; lines of options end before column 80."""

    def __init__(self, prog: str):
        columns = min(_COLUMNS, shutil.get_terminal_size().columns)
        super().__init__(prog, width=columns - 2)

    def _split_lines(self, text: str, width: int) -> list[str]:
        lines = [textwrap.wrap(line, width) for line in text.splitlines()]
        return [part for line in lines for part in line]
