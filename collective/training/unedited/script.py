"""Runs a file or a module as Python's command line does."""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType
from typing import Any

import keras
import tensorflow as tf

import collective
from collective import python_command
from collective.errors import UsageError
from collective.training.process.failure import own_excepthook

_OWN = os.path.join(os.path.dirname(collective.__file__), "")  # this package's folder


class Script:
    """What ``python script.py``, or ``-m module`` where path is empty, would run."""

    def __init__(self, path: str, module: str, arguments: Sequence[str]):
        self.spec: ModuleSpec | None = None
        if module:
            # Like ``python -m``, this looks for modules in the working directory.
            _first_on_path(os.getcwd())
            self.spec = _find(module)
            path = self.spec.origin or module
        else:
            _first_on_path(os.path.dirname(os.path.realpath(path)))
        self.path = path
        self.file = os.path.abspath(path)
        sys.argv = [path, *arguments]

    def run(self) -> None:
        """Run the script as ``__main__``, which it stays: its classes can be pickled."""
        main, spec, file = ModuleType("__main__"), self.spec, self.file
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
    """Put a folder where ``python -m`` has put the working directory."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[: not python_command.started()] = [folder]


def _find(module: str) -> ModuleSpec:
    """Return the module, or ``__main__`` of the package."""
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
    """Print the traceback that Python would print for the script alone.

    By the ``sys.excepthook`` of the script, if it has one.
    Without the lines of this package, Keras and TensorFlow, also of what the error was
    raised from; all lines after ``keras.config.disable_traceback_filtering()``. As by
    Python, the error is in ``sys.last_value`` from then on.
    """
    sys.last_type, sys.last_value = type(error), error
    sys.last_traceback = error.__traceback__
    if hook := own_excepthook():
        try:
            hook(type(error), error, error.__traceback__)
            return
        except Exception as of_hook:
            print("Error in sys.excepthook:", file=sys.stderr)
            traceback.print_exception(of_hook)
            print("\nOriginal exception was:", file=sys.stderr)
    if keras.config.is_traceback_filtering_enabled():
        shown = traceback.TracebackException.from_exception(error)
        _leave_out_libraries(shown)
        print("".join(shown.format()), end="", file=sys.stderr, flush=True)
        return
    traceback.print_exception(error)


def _leave_out_libraries(shown: traceback.TracebackException) -> None:
    """Strip library frames from an error and its causes; drop errors that have no others."""
    own = [frame for frame in shown.stack if not _is_machinery(frame.filename)]
    shown.stack[:] = own
    for name in ("__cause__", "__context__"):
        other = getattr(shown, name)
        if other is None:
            continue
        _leave_out_libraries(other)
        if not other.stack:
            setattr(shown, name, None)


def _is_machinery(file: str) -> bool:
    return file.startswith((*_MACHINERY, "<frozen importlib")) or file == _CONTEXTS


def is_library(file: str) -> bool:
    """Return whether code is not the script's: of Python, an installed package or this one."""
    return file.startswith((*_LIBRARIES, "<frozen "))


def is_own(file: str) -> bool:
    """Return whether code is of this package."""
    return file.startswith(_OWN)


def is_standard_library(file: str) -> bool:
    """Return whether code is of Python itself, not of an installed package."""
    if file.startswith("<frozen "):
        return True
    return file.startswith(_STANDARD) and not file.startswith(_INSTALLED)


def _folder(module: ModuleType) -> str:
    return os.path.join(os.path.dirname(module.__file__ or ""), "")


# The folders whose lines say little about an error of the script: this package and others.
_MACHINERY = *map(_folder, (collective, keras, tf)), _OWN
_CONTEXTS = contextlib.__file__  # between our lines


def _paths(*names: str) -> tuple[str, ...]:
    return tuple(os.path.join(sysconfig.get_path(name), "") for name in names)


_STANDARD, _INSTALLED = _paths("stdlib", "platstdlib"), _paths("purelib", "platlib")
_LIBRARIES = _OWN, *_STANDARD, *_INSTALLED
