"""Files of an unedited script: rank 0 writes models, and one rank downloads at a time.

TensorFlow refuses a data set's cache file that another process is writing, so each rank
writes its own. A cache that is complete is read by all ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import glob
import hashlib
import inspect
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from collective.training.keras_compat import entry_points
from collective.training.unedited.script_job import ScriptJob

Save = Callable[[str], Any]
Arguments = Mapping[str, Any]
Write = Callable[[str, Save, Arguments], Any]
_CLOCK_SECONDS = 1.0  # by which a file system's clock may be behind


def replace_savers(job: ScriptJob) -> None:
    """Have rank 0 alone write what Keras' functions write, and downloads wait.

    A rank whose path differs from rank 0's writes it: ``model.save(f"{pid}.keras")``, or
    into a temporary folder. So does one that writes into an open file.
    """

    def on_rank_zero(path: str, save: Save, arguments: Arguments) -> Any:
        if job.inside:
            return save(path)
        return job.write(os.path.abspath(path), lambda: save(path))

    for saver in entry_points.savers():
        replace_saver(job, *saver, on_rank_zero)
    get_file = entry_points.get_file()
    for place in entry_points.places_of(get_file):
        job.replace(*place, _one_at_a_time(get_file))


def replace_saver(
    job: ScriptJob, owner: Any, name: str, parameter: str, write: Write
) -> None:
    """Replace one of ``entry_points.savers()`` that is given a path.

    Args:
        write: Takes the path, what saves to a path, and all arguments by name. Returns
            what the saver is to return.
    """
    stock = getattr(owner, name)
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def saver(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        path = bound.arguments[parameter]
        if not isinstance(path, (str, os.PathLike)):
            return stock(*args, **kwargs)

        def save(path: str) -> Any:
            bound.arguments[parameter] = path
            return stock(*bound.args, **bound.kwargs)

        return write(os.fspath(path), save, bound.arguments)

    if inspect.isclass(owner):
        job.replace(owner, name, saver)
    else:
        for place in entry_points.places_of(stock):
            job.replace(*place, saver)


@contextlib.contextmanager
def one_at_a_time(name: str) -> Iterator[None]:
    """Hold a lock file in Keras' cache: ranks of a host must not download together."""
    lock = keras_cache() / f".{name}.lock"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        # Keras falls back to a cache in /tmp, where others may leave a link of this name.
        how = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(lock, how, 0o666)
    except OSError:  # a read-only cache: no rank downloads into it
        yield
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def keras_cache() -> Path:
    """Return ``$KERAS_HOME/datasets``, or ``~/.keras/datasets``."""
    home = os.environ.get("KERAS_HOME") or os.path.join("~", ".keras")
    return Path(home).expanduser() / "datasets"


def _one_at_a_time(get_file: Callable[..., Any]) -> Callable[..., Any]:
    """Let the first rank download; those that waited find the file in the cache."""

    @functools.wraps(get_file)
    def get(*args: Any, **kwargs: Any) -> Any:
        name = hashlib.sha256(repr((args, sorted(kwargs))).encode()).hexdigest()[:16]
        with one_at_a_time(name):
            return get_file(*args, **kwargs)

    return get


def replace_mkdir(job: ScriptJob) -> None:
    """Have ``os.mkdir`` take a folder that another rank of this job has just made.

    Every rank runs ``if not os.path.exists(folder): os.makedirs(folder)``, and all but
    one would fail. A rank takes each folder once: a second ``mkdir`` fails as ever.
    """
    stock, taken = os.mkdir, job.made
    since = time.time() - _CLOCK_SECONDS

    @functools.wraps(stock)
    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        whole = os.path.abspath(os.fsdecode(path))
        try:
            stock(path, *args, **kwargs)
        except FileExistsError:
            by_other_rank = whole not in taken and _made_since(whole, since)
            if kwargs.get("dir_fd") is not None or not by_other_rank:
                raise
        taken.add(whole)

    job.replace(os, "mkdir", mkdir)


def _made_since(path: str, since: float) -> bool:
    return os.path.isdir(path) and os.stat(path).st_ctime >= since


def replace_cache(job: ScriptJob) -> None:
    """Have every rank but 0 cache into a file of its own, which it removes at its end."""
    stock, rank = tf.data.Dataset.cache, job.backend.rank
    if not rank:
        return

    @functools.wraps(stock)
    def cache(
        self: tf.data.Dataset, filename: Any = "", *args: Any, **kwargs: Any
    ) -> Any:
        plain = isinstance(filename, str | os.PathLike)
        if plain and os.fspath(filename) and not _is_complete(filename):
            filename = f"{os.fspath(filename)}-rank{rank}-{os.getpid()}"
            atexit.register(_remove, filename)
        return stock(self, filename, *args, **kwargs)

    job.replace(tf.data.Dataset, "cache", cache)


def _is_complete(filename: str | os.PathLike[str]) -> bool:
    return os.path.exists(f"{os.fspath(filename)}.index")


def _remove(filename: str) -> None:
    for path in glob.glob(f"{glob.escape(filename)}[._]*"):
        with contextlib.suppress(OSError):
            os.remove(path)
