"""Checkpoints of ``tf.train`` that all ranks write to one path.

TensorFlow writes the parts of a checkpoint into ``PATH_temp`` and joins them, so ranks that
write one path move each other's parts. Here each rank writes under a name of its own, and
renames that: each file is always that of one rank, and those of all ranks are alike. As no
rank waits for another, a program may write on rank 0 alone, or elsewhere on each rank.
All ranks also delete old checkpoints, and a file that another rank has deleted is gone as
it should be: TensorFlow would warn of each.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

import tensorflow as tf

from collective.training.keras_compat import entry_points
from collective.training.unedited.script_job import ScriptJob


def replace_checkpoint_writer(job: ScriptJob) -> None:
    """Have ``tf.train.Checkpoint`` and ``CheckpointManager`` write side by side."""
    owner = entry_points.checkpoint_writer()
    stock = owner.save

    @functools.wraps(stock)
    def save(self: Any, file_prefix: Any, options: Any = None) -> Any:
        if not tf.executing_eagerly():
            return stock(self, file_prefix, options)
        path = tf.compat.as_str(tf.get_static_value(tf.convert_to_tensor(file_prefix)))
        own = f"{path}.rank{job.backend.rank}_"
        result = stock(self, tf.constant(own), options)
        _rename(own, path)
        return result

    job.replace(owner, "save", save)
    job.replace(*entry_points.checkpoint_deleter(), _delete)


def _delete(pattern: str) -> None:
    """Delete the files that are still there."""
    for path in tf.io.gfile.glob(pattern):
        with contextlib.suppress(tf.errors.NotFoundError):
            tf.io.gfile.remove(path)


def _rename(own: str, path: str) -> None:
    """Give the files whose names begin with ``own`` those that begin with ``path``.

    The index last: with it, TensorFlow takes the checkpoint to be complete.
    """
    folder, begin = os.path.split(own)
    names = [n for n in tf.io.gfile.listdir(folder or ".") if n.startswith(begin)]
    for name in sorted(names, key=lambda name: (name.endswith(".index"), name)):
        target = path + name.removeprefix(begin)
        tf.io.gfile.rename(os.path.join(folder, name), target, overwrite=True)
