"""The state of a training, kept on each host for the job's next round.

In the form of a checkpoint, with its checksums, in a folder of the user's alone. The
newest of what the hosts have kept is what all go on from, so any one of them is enough.
"""

from __future__ import annotations

import itertools
import sys

import keras

from collective.backends.base import Backend
from collective.elastic import generations
from collective.training.checkpoint import storage
from collective.training.checkpoint.state import State
from collective.training.input.plan import Plan

_trainings = itertools.count()  # of this process


class Handover:
    """What one round of a job gives to the next.

    Args:
        backend: Its first rank on each host keeps, and finds.

    Attributes:
        possible: Whether there may be a next round. Only in the first training of a
            script: what came before it would be made again.
    """

    def __init__(self, backend: Backend):
        self.possible = generations.may_restart() and next(_trainings) == 0
        self.backend = backend

    @property
    def _mine(self) -> bool:
        return self.possible and self.backend.local_rank == 0

    def find(self, model: keras.Model, plan: Plan) -> State | None:
        """What this host has kept in the round before; None if nothing."""
        folder = generations.kept_state() if self._mine else None
        if folder is None:
            return None
        try:
            found = storage.saved_in(folder)
            return storage.read(found[0], model, plan) if found else None
        except (storage.Unusable, OSError) as error:
            _tell(f"what {folder} keeps is not used: {error}")
            return None

    def keep(self, state: State, model: keras.Model, plan: Plan) -> bool:
        """Keeps a state; whether that was done here."""
        if not self._mine:
            return False
        try:
            storage.write(state, model, plan, generations.make_state_folder())
        except Exception as error:
            _tell(f"step {state.step} could not be kept for the next round: {error}")
            generations.remove_state()
            return False
        return True

    def taken(self, step: int | None) -> None:
        """Every rank goes on from that step; None: nobody has kept anything."""
        if not self.possible or not generations.number():
            return
        if self._mine:
            generations.remove_state()
        if self.backend.rank:
            return
        if step is None:
            _tell("no host has kept the state: the training begins anew")
            return
        size = self.backend.size
        print(
            f"collective: round {generations.number()}: {size} "
            f"rank{'s go' if size > 1 else ' goes'} on from step {step}",
            file=sys.stderr,
            flush=True,
        )


def _tell(what: str) -> None:
    print(f"warning: {what}", file=sys.stderr, flush=True)
