"""``tf.data.Dataset.cache(file)`` of an unedited script: a file for each rank.

TensorFlow refuses a cache that another process is writing. A cache that is complete is
read by all ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import glob
import os
from typing import Any

import tensorflow as tf

from collective.training.unedited.job import Job


def replace_cache(job: Job) -> None:
    """Has every rank but 0 cache into a file of its own, which it removes at its end."""
    stock, rank = tf.data.Dataset.cache, job.backend.rank
    if not rank:
        return

    @functools.wraps(stock)
    def cache(self: tf.data.Dataset, filename: Any = "", *args: Any, **kwargs: Any):
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
