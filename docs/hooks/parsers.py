"""The parsers of the project's programs, for the pages that list options and for tests."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any
from unittest import mock


class _Captured(Exception):
    """Carries a program's parser out of its ``main``."""

    def __init__(self, parser: argparse.ArgumentParser):
        self.parser = parser


def parser_of(module: str) -> argparse.ArgumentParser:
    """Return the parser of the program whose ``main`` is in a module.

    The parser is caught when it is about to print its help, so this function depends on
    nothing but ``main``.
    """

    def capture(parser: argparse.ArgumentParser, file: Any = None) -> None:
        raise _Captured(parser)

    main = importlib.import_module(module).main
    with (
        mock.patch.object(argparse.ArgumentParser, "print_help", capture),
        mock.patch.object(sys, "argv", [module, "--help"]),
    ):
        try:
            main(["--help"])
        except _Captured as captured:
            return captured.parser
    raise LookupError(f"{module}.main(['--help']) prints no help of argparse")
