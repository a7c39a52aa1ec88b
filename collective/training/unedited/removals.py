"""Files that an unedited script removes and renames: once, when no rank needs them.

So are files that callbacks of Keras copy.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import os
import pathlib
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from collective.training.keras_compat.entry_points import in_callback, is_of_keras
from collective.training.unedited.script import is_library
from collective.training.unedited.script_job import ScriptJob

_REMOVALS = (
    *((os, name) for name in ("remove", "unlink", "rmdir", "rename", "replace")),
    *((shutil, name) for name in ("rmtree", "move")),
    *((pathlib.Path, name) for name in ("unlink", "rmdir", "rename", "replace")),
)
# The end of a ``with tempfile.TemporaryDirectory()`` of the script.
_BETWEEN = (tempfile.__file__, contextlib.__file__)
_RENAMINGS = ("rename", "replace", "move")


def replace_removals(job: ScriptJob) -> None:
    """Have rank 0 alone remove and rename what the script itself removes and renames.

    Every rank runs ``os.remove(path)``, and all but one would fail, or one would remove
    what another still reads. So the ranks meet first (``ScriptJob.remove``). Calls from
    libraries, threads and child processes are left as they are.
    """
    for owner, name in _REMOVALS:
        job.replace(owner, name, _removal(job, getattr(owner, name)))
    job.replace(shutil, "copy", _copying(job))
    stock = builtins.open

    @functools.wraps(stock)
    def noting(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        opened = stock(file, mode, *args, **kwargs)
        if isinstance(file, str | os.PathLike) and {*mode} & {*"wax+"}:
            job.made.add(os.path.abspath(file))
        return opened

    for module in (builtins, io):
        job.replace(module, "open", noting)


def _copying(job: ScriptJob) -> Callable[..., Any]:
    """Return a ``shutil.copy`` that on rank 0 alone copies what a callback of Keras does."""
    stock = shutil.copy

    @functools.wraps(stock)
    def copy(src: Any, dst: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        file = frame.f_code.co_filename
        if job.inside or not (is_of_keras(file) and in_callback(frame)):
            return stock(src, dst, **kwargs)
        job.write(os.path.abspath(dst), lambda: stock(src, dst, **kwargs))
        return dst

    return copy


def _removal(job: ScriptJob, stock: Callable[..., Any]) -> Callable[..., Any]:
    name, process = stock.__name__, os.getpid()

    @functools.wraps(stock)
    def remove(*args: Any, **kwargs: Any) -> Any:
        paths = [os.fspath(a) for a in args[:2] if isinstance(a, str | os.PathLike)]
        by_script = (
            paths
            and not job.inside
            and os.getpid() == process
            and threading.current_thread() is threading.main_thread()
            and _asks(sys._getframe(1))
        )
        if not by_script:
            return stock(*args, **kwargs)
        whole = [os.path.abspath(os.fsdecode(path)) for path in paths]
        private = whole[0] in job.copies

        def removed() -> Any:
            return None if private else stock(*args, **kwargs)

        result = job.remove(whole, removed)
        _forget(job, whole)
        if name in _RENAMINGS and isinstance(args[0], pathlib.Path):
            return type(args[0])(paths[1])
        return paths[1] if name == "move" else result

    return remove


def _forget(job: ScriptJob, paths: Sequence[str]) -> None:
    """Forget removed or renamed files, and count new names as made by this rank."""
    below = os.path.join(paths[0], "")
    job.made -= {p for p in job.made if (p + os.sep).startswith(below)}
    job.made.update(paths[1:])
    copy = job.copies.pop(paths[0], None)
    if copy is not None and paths[1:]:
        job.copies[paths[1]] = copy


def _asks(frame: FrameType | None) -> bool:
    """Return whether the script removes a file, or a callback of Keras' own."""
    while frame is not None and frame.f_code.co_filename in _BETWEEN:
        frame = frame.f_back
    if frame is None:
        return False
    file = frame.f_code.co_filename
    return not is_library(file) or (is_of_keras(file) and in_callback(frame))
