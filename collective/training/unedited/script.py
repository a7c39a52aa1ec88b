"""Runs a file or a module as Python's command line does."""

from __future__ import annotations

import builtins
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any

import collective
from collective import python_command
from collective.errors import CollectiveError, UsageError

_OWN = os.path.join(os.path.dirname(collective.__file__), "")  # this package's folder


class Script:
    """What ``python script.py`` or ``python -m module`` would run.

    Args:
        path: Of the script; empty with a module.
        module: Its name; empty with a script.
    """

    def __init__(self, path: str, module: str, arguments: Sequence[str]):
        self.spec: ModuleSpec | None = None
        if module:
            # As with ``python -m``, modules are looked for in the working directory.
            _first_on_path(os.getcwd())
            self.spec = _find(module)
            path = self.spec.origin or module
        else:
            _first_on_path(os.path.dirname(os.path.realpath(path)))
        self.path = path
        sys.argv = [path, *arguments]

    def run(self) -> None:
        """Runs it as ``__main__``, which it stays: its classes can be pickled."""
        main, spec = ModuleType("__main__"), self.spec
        file = os.path.abspath(self.path)
        if spec is None:
            loader: Any = SourceFileLoader("__main__", file)
            code = loader.source_to_code(loader.get_data(file), file)
        else:
            loader = spec.loader
            code = loader.get_code(spec.name)
            if code is None:
                raise UsageError(f"module {spec.name} has no code", hint="another one")
        main.__dict__.update(
            __file__=file,
            __builtins__=builtins,
            __spec__=spec,
            __loader__=loader,
            __package__=None if spec is None else spec.parent,
        )
        sys.modules["__main__"] = main
        exec(code, main.__dict__)


def _first_on_path(folder: str) -> None:
    """In the place of the working directory, where ``python -m`` has put that."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[: not python_command.started()] = [folder]


def _find(module: str) -> ModuleSpec:
    """The module, or ``__main__`` of the package."""
    try:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{module}.__main__")
    except ImportError:
        spec = None
    if spec is None or not hasattr(spec.loader, "get_code"):
        raise UsageError(f"no module named {module}", hint="its name, as in import")
    return spec


def print_failure(error: BaseException) -> None:
    """Prints the traceback that Python would print for the script alone.

    Of our own errors, which say themselves what to do, only the script's lines are shown.
    """
    trace = error.__traceback__
    while trace is not None and _is_own(trace):
        trace = trace.tb_next
    if not isinstance(error, CollectiveError):
        traceback.print_exception(type(error), error, trace)
        return
    frames = [f for f in traceback.extract_tb(trace) if not _is_library(f.filename)]
    print("Traceback (most recent call last):", file=sys.stderr)
    print("".join(traceback.format_list(frames)), end="", file=sys.stderr)
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)


def _is_own(trace: TracebackType) -> bool:
    """Whether a frame lies above the script."""
    name = trace.tb_frame.f_code.co_filename
    return _is_library(name) or name.startswith("<frozen importlib")


def _is_library(file: str) -> bool:
    return file.startswith(_OWN)
