"""How ranks stop to train in an elastic job, or wait before they go on; under any loop."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import numpy as np

from collective.backends.base import Backend
from collective.elastic import generations
from collective.elastic.preemption import LEAVES, RESTARTS, WAITING
from collective.errors import (
    CollectiveError,
    JoinRejected,
    NextGeneration,
    UsageError,
)
from collective.running_time import Deadline
from collective.training.loop.position import Position
from collective.training.observers.checkpoint.schedule import Checkpoint
from collective.training.observers.elastic.state_handoff import StateHandoff
from collective.training.process.object_collectives import gather_few

# A job with too few ranks that may grow waits so long for more, as Horovod does.
WAIT_SECONDS = 600.0
POLL_SECONDS = 0.2


@contextlib.contextmanager
def rejecting(backend: Backend, is_new: bool) -> Iterator[None]:
    """Have a rank that joins end, if its training is another one than that of the others.

    Raises:
        JoinRejected: On that rank, in place of a UsageError.
    """
    try:
        yield
    except UsageError as error:
        if not is_new:
            raise
        print(f"rank {backend.rank}: error: {error}", file=sys.stderr)
        backend.close()
        raise JoinRejected(error.exit_code) from None


def wait_for_ranks(
    backend: Backend,
    least: int,
    flags: Callable[[], int],
    restart: Callable[[], object],
) -> bool:
    """Wait for ranks that join a job with too few; every rank calls it.

    Args:
        flags: Returns what this rank knows of ranks that leave or wait; see
            ``Preemption``.
        restart: Begins the job's next generation, if it can.

    Returns:
        Whether ranks wait to join; False if none has come in time.
    """
    if backend.rank == 0:
        print(
            f"collective: too few ranks to continue: {backend.size}, and --min-np "
            f"is {least}; waiting {WAIT_SECONDS:.0f} s for others to join",
            file=sys.stderr,
            flush=True,
        )
    deadline = Deadline(WAIT_SECONDS)
    while True:
        mine = flags()
        gives_up = bool(mine & LEAVES) or deadline.passed()
        mine &= WAITING | RESTARTS
        found, gives_up = backend.broadcast_array(np.array([mine, gives_up]))
        if found & RESTARTS:
            restart()
        if found & WAITING:
            return True
        if gives_up:
            return False
        time.sleep(POLL_SECONDS)


def begin_next_generation(
    backend: Backend, handoff: StateHandoff, checkpoint: Checkpoint | None
) -> None:
    """Keep the state and end every rank; return if no host can keep it.

    Raises:
        NextGeneration: The state is kept.
    """
    if not handoff.possible:
        return
    if checkpoint is not None:
        checkpoint.wait()  # Keras writes one file of a model at a time
    if gather_few(backend, [handoff.keep()]).any():
        raise NextGeneration(generations.EXIT_CODE)
    handoff.possible = False  # the job continues as it is


def give_up(
    position: Position,
    checkpoint: Checkpoint | None,
    left: int,
    size: int,
    least: int,
) -> NoReturn:
    """End the job, with a checkpoint if the user asked for checkpoints.

    Args:
        left, size: How many ranks are left, and of how many.
        least: How many there must be.

    Raises:
        CollectiveError: Always, on rank 0; it aborts the job.
    """
    if position.backend.rank:
        position.backend.barrier()  # rank 0 ends the job
    if checkpoint is not None:
        checkpoint.save_last(position.start or position.take())
        hint = f"--resume continues from {checkpoint.folder}, on fewer ranks, too"
    else:
        hint = "--checkpoint-dir, to continue from there"
        hint = f"a smaller --min-np; and {hint}" if left else hint
    raise CollectiveError(
        f"step {position.step}: of {size} ranks {left} "
        f"{'is' if left == 1 else 'are'} left, and --min-np is {least}",
        hint=hint,
        everywhere=False,
    )
