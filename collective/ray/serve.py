"""What a rank of a ``RayExecutor`` runs: it makes the calls that its actor passes to it."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Client
from typing import Any

import cloudpickle

from collective.environment import detect
from collective.launch.agents import folders
from collective.ray.worker import calls, socket_path


def serve(
    job: str,
    executable_cls: type | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Makes the executable, and calls each function with it; returns at ``shutdown``.

    Raises:
        EOFError: The actor was lost.
        Exception: That of a function that failed: the rank ends, and with it the job,
            because other ranks may wait for this one.
    """
    here = detect()
    path = socket_path(folders.make(job), here.local_rank)
    with Client(str(path), "AF_UNIX") as actor:
        executable = executable_cls(*args, **kwargs) if executable_cls else None
        actor.send_bytes(b"%d" % here.rank)
        for call in calls(actor):
            try:
                answer = cloudpickle.dumps((True, call(executable)))
            except BaseException:
                text = f"rank {here.rank} failed\n{traceback.format_exc().rstrip()}"
                actor.send_bytes(cloudpickle.dumps((False, text)))
                raise
            actor.send_bytes(answer)
