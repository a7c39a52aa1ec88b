"""``--private-files``: every rank but 0 has files of its own, and sees those of rank 0."""

from __future__ import annotations

import functools
import sys
from typing import Any

import tensorflow as tf

from collective.log import log
from collective.training.unedited.job import Job
from collective.training.unedited.private_files import PrivateFiles

_TUNER = "keras_tuner"
# Of ``tf.io.gfile``, which Python's audit hooks do not see: the places of paths that change.
_GFILE = {
    "remove": (0,),
    "rmtree": (0,),
    "mkdir": (0,),
    "makedirs": (0,),
    "rename": (0, 1),
    "copy": (1,),
}


def use_private_files(job: Job) -> None:
    """Gives every rank but 0 files of its own from now on; every rank calls it."""
    if job.keeps_private or job.backend.size == 1:
        return
    job.keeps_private = True
    if job.backend.rank == 0:
        return
    job.private = private = PrivateFiles()
    _replace_gfile(job, private)
    job.on_undo(private.close)
    job.takes_over.append(lambda: _take_over(job, private))


def _take_over(job: Job, private: PrivateFiles) -> None:
    """This rank has become rank 0: its files are the real ones from now on."""
    job.private = None
    for path in private.hand_over():
        log.warning(
            "%s is as rank 0 has left it, which may be in the middle of writing it",
            path,
        )


def follow_tuners(job: Job) -> None:
    """Does so when the script imports KerasTuner.

    Its search deletes, writes and reads one folder, on every rank.
    """

    def use() -> None:
        if not job.keeps_private and job.backend.rank == 0:
            log.info(
                "KerasTuner: ranks other than 0 have files of their own from now on, as "
                "with --private-files"
            )
        use_private_files(job)

    if _TUNER in sys.modules:
        use()
        return

    def before(event: str, args: tuple[Any, ...]) -> None:
        if event == "import" and args[0] == _TUNER and not job.undone:
            use()

    sys.addaudithook(before)


def _replace_gfile(job: Job, private: PrivateFiles) -> None:
    for name, places in _GFILE.items():
        job.replace(tf.io.gfile, name, _owning(name, places, private))

    class GFile(tf.io.gfile.GFile):
        def __init__(self, name: Any, mode: str = "r"):
            if {*mode} & {*"wax+"}:
                private.own(name, emptied="w" in mode)
            super().__init__(name, mode)

    job.replace(tf.io.gfile, "GFile", GFile)


def _owning(name: str, places: tuple[int, ...], private: PrivateFiles) -> Any:
    stock = getattr(tf.io.gfile, name)

    @functools.wraps(stock)
    def change(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        for place in places:
            if place < len(given):
                private.own(given[place])
        return stock(*args, **kwargs)

    return change
