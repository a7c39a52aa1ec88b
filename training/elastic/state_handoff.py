"""The state of a training, kept on each host for the job's next generation.

In the form of a checkpoint, with its checksums, in a folder of the user's alone. Every
rank continues from the newest state that any host has kept, so one host is enough.
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


class StateHandoff:
    """What one generation of a job gives to the next.

    Args:
        backend: The first rank of each host keeps and finds the state.

    Attributes:
        possible: Whether there may be a next generation. Only in the first training of
            a script: the next generation would repeat those before it.
    """

    def __init__(self, backend: Backend):
        self.possible = generations.may_restart() and next(_trainings) == 0
        self.backend = backend

    @property
    def _keeps(self) -> bool:
        return self.possible and self.backend.local_rank == 0

    def find(self, model: keras.Model, plan: Plan) -> State | None:
        """What this host has kept in the former generation; None if nothing."""
        folder = generations.kept_state() if self._keeps else None
        if folder is None:
            return None
        try:
            found = storage.saved_in(folder)
            return storage.read(found[0], model, plan) if found else None
        except (storage.Unusable, OSError) as error:
            _warn(f"what {folder} keeps is not used: {error}")
            return None

    def keep(self, state: State, model: keras.Model, plan: Plan) -> bool:
        """Keeps a state; returns whether this process has kept it."""
        if not self._keeps:
            return False
        try:
            storage.write(state, model, plan, generations.make_state_folder())
        except Exception as error:
            _warn(
                f"step {state.step} could not be kept for the next generation: {error}"
            )
            generations.remove_state()
            return False
        return True

    def taken(self, step: int | None) -> None:
        """Every rank has the state to start from: removes what was kept.

        Args:
            step: Where every rank continues; None if no host has kept a state.
        """
        if not self.possible or not generations.number():
            return
        if self._keeps:
            generations.remove_state()
        if self.backend.rank:
            return
        if step is None:
            _warn("no host has kept the state: the training starts again at step 0")
            return
        size = self.backend.size
        print(
            f"collective: generation {generations.number()}: {size} "
            f"rank{'s continue' if size > 1 else ' continues'} from step {step}",
            file=sys.stderr,
            flush=True,
        )


def _warn(what: str) -> None:
    print(f"warning: {what}", file=sys.stderr, flush=True)
