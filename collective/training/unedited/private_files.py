"""Logs that callbacks and scripts write: rank 0's are the real ones.

Every rank runs the script and its callbacks, so every rank would write each log. Here the
other ranks write to private copies: what callbacks write, and
what anything appends. What a rank has written it also reads there. Other files of a script
are written by every rank, which soon reads them, maybe not by Python. If rank 0 dies, the next rank 0 puts its copies in their place: it ran the
same program, so they have the same content. Files that Keras saves are written by rank 0
while the others wait (``files``). SQLite's data bases, which keep studies of Optuna, are copied
as logs are; what other libraries in C write is left as it is.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import io
import os
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import tensorflow as tf

from collective.training.keras_compat.entry_points import in_callback
from collective.training.unedited.files import keras_cache
from collective.training.unedited.script import is_own, is_standard_library
from collective.training.unedited.script_job import ScriptJob


def keep_writes_private(job: ScriptJob) -> None:
    """Have every rank but 0 write files of the script to copies of its own."""
    if job.backend.rank == 0:
        return
    files = _PrivateFiles(job)
    for module in (builtins, io):
        job.replace(module, "open", files.replacing(module.open))
    created = files.creating(tf.summary.create_file_writer)
    # The module that is imported by its name is another one than TensorFlow's attribute.
    for summary in (tf.summary, importlib.import_module("tensorflow.summary")):
        job.replace(summary, "create_file_writer", created)
    with contextlib.suppress(ImportError):  # a Python that was built without it
        import sqlite3

        connect = files.connecting(sqlite3.connect)
        for module in (sqlite3, sqlite3.dbapi2):
            job.replace(module, "connect", connect)
    job.takes_over.append(files.publish)


# A larger data base is taken for data that the script reads.
_MOST_BYTES = 2**28


class _PrivateFiles:
    """The copies of one rank: files without a name, which end with the process."""

    def __init__(self, job: ScriptJob):
        self._job = job
        self._copies = job.copies
        self._held: list[Any] = []
        self._since = time.time() - 1.0  # the clock of a file system may be behind
        self._open: weakref.WeakSet[Any] = weakref.WeakSet()
        self._published = False
        self._folders: list[tempfile.TemporaryDirectory[str]] = []

    def creating(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Return a ``create_file_writer`` whose writers have folders of their own.

        A writer that does nothing would not do: the step of a model that writes summaries
        would be another graph than on rank 0.
        """

        @functools.wraps(stock)
        def created(logdir: Any, *args: Any, **kwargs: Any) -> Any:
            if self._published or self._job.undone:
                return stock(logdir, *args, **kwargs)
            return stock(self._folder("-summaries"), *args, **kwargs)

        return created

    def replacing(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Return an ``open`` that opens copies."""

        @functools.wraps(stock)
        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            path = self._copy(file, mode)
            if path is not None:
                file, mode = path, mode.replace("x", "w")
            found = stock(file, mode, *args, **kwargs)
            if path is not None:
                with contextlib.suppress(TypeError):
                    self._open.add(found)
            return found

        return opened

    def connecting(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Return a ``sqlite3.connect`` that connects to copies.

        Each rank would add its trial to a study, and rows to a table. A data base that is
        older than the job is copied unless rank 0 has written to it by then; if it has,
        ranks part, and the next call of Keras says so.
        """

        @functools.wraps(stock)
        def connect(database: Any, *args: Any, **kwargs: Any) -> Any:
            copy = self._data_base(database, stock)
            return stock(copy or database, *args, **kwargs)

        return connect

    def _data_base(self, database: Any, connect: Callable[..., Any]) -> str | None:
        """Return the copy to connect to, or None for the data base itself."""
        if self._published or self._job.undone:
            return None
        if not isinstance(database, str | os.PathLike):
            return None
        name = os.fsdecode(database)
        if name in ("", ":memory:") or name.startswith("file:"):
            return None
        path = os.path.abspath(name)
        if path not in self._copies:
            if os.path.exists(path) and os.path.getsize(path) > _MOST_BYTES:
                return None
            copy = os.path.join(self._folder("-sqlite"), os.path.basename(path))
            if self._is_of_script(path):
                closing = contextlib.closing
                with closing(connect(path)) as old, closing(connect(copy)) as new:
                    old.backup(new)
            self._copies[path] = copy
        return self._copies[path]

    def _copy(self, file: Any, mode: str) -> str | None:
        """Return the copy to open in place of a file, or None for the file itself."""
        if self._published or self._job.undone:
            return None
        if not isinstance(file, str | os.PathLike) or not isinstance(mode, str):
            return None
        path = os.path.abspath(os.fsdecode(file))
        if not {*mode} & {*"wax+"}:
            return self._copies.get(path)
        if not _is_log(path, mode):
            return None
        self._job.made.add(path)
        copy = self._copies.get(path)
        if copy is None:
            if "x" in mode and self._was_there(path):
                return None  # the same error as on rank 0
            self._held.append(tempfile.TemporaryFile())  # noqa: SIM115
            copy = f"/proc/self/fd/{self._held[-1].fileno()}"
            if {*mode} & {*"a+"} and "w" not in mode and os.path.isfile(path):
                shutil.copyfile(path, copy)
            self._copies[path] = copy
        return copy

    def _is_of_script(self, path: str) -> bool:
        """Return whether a file is older than the job, or this rank has made or loaded it.

        Other files that are there were made by rank 0, which is ahead.
        """
        cache = os.path.join(keras_cache(), "")
        is_made = path in self._job.made or path.startswith(cache)
        return (is_made and os.path.exists(path)) or self._was_there(path)

    def _folder(self, suffix: str) -> str:
        """Make a folder that ends with the process; return its path."""
        made = tempfile.TemporaryDirectory(suffix, ignore_cleanup_errors=True)
        self._folders.append(made)
        return made.name

    def _was_there(self, path: str) -> bool:
        """Return whether a file is older than the job: rank 0 may just have made it."""
        return os.path.exists(path) and os.stat(path).st_ctime < self._since

    def publish(self) -> None:
        """Put the copies in the place of the files, when this rank becomes rank 0."""
        self._published = True
        for file in list(self._open):
            with contextlib.suppress(ValueError, OSError):
                file.flush()
        for path, copy in self._copies.items():
            with contextlib.suppress(OSError):
                shutil.copyfile(copy, path)
        for file in list(self._open):
            with contextlib.suppress(ValueError, OSError):
                self._continue(file)

    def _continue(self, file: Any) -> None:
        """Have an open copy write to the file itself from now on."""
        by_copy = {copy: path for path, copy in self._copies.items()}
        if file.closed or not file.writable():
            return
        target = os.open(by_copy[file.name], os.O_RDWR)
        os.lseek(target, 0, os.SEEK_END)
        os.dup2(target, file.fileno())
        os.close(target)


def _is_log(path: str, mode: str) -> bool:
    """Return whether a callback, or the script at the end of a file, writes."""
    if path.startswith(("/dev/", "/proc/")):
        return False
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and is_standard_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or is_own(frame.f_code.co_filename):
        return False
    return "a" in mode or in_callback(frame)
