"""The state of a training, kept on each host for the job's next generation.

It has the form of a checkpoint, with checksums, in a folder that only the user can read.
Every rank continues from the newest state that any host has kept, so one host is enough.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from typing import Any

from collective.elastic import generations
from collective.log import log
from collective.training.loop.position import Position
from collective.training.observers.checkpoint import storage

_trainings = itertools.count()  # of this process


class StateHandoff:
    """The state that one generation of a job gives to the next.

    The first rank of each host keeps and finds the state.
    """

    def __init__(self, position: Position, plan: Mapping[str, Any]):
        # Whether there may be a next generation. This is so in the first training of a
        # script only, because the next generation would repeat earlier trainings.
        self.possible = generations.may_restart() and next(_trainings) == 0
        self._position, self._plan = position, plan
        self._backend = position.backend

    @property
    def _keeps(self) -> bool:
        return self.possible and self._backend.local_rank == 0

    def find(self) -> None:
        """Set the position's ``start`` to the state that this host has kept, if any."""
        folder = generations.kept_state() if self._keeps else None
        if folder is None:
            return
        position = self._position
        try:
            if found := storage.saved_in(folder):
                position.start, _ = storage.read(found[0], position.model, self._plan)
        except (storage.Unusable, OSError) as error:
            log.warning(f"what {folder} keeps is not used: {error}")

    def keep(self) -> bool:
        """Keep the state now; return whether this process has. Every rank calls it."""
        state = self._position.latest()  # a collective
        if not self._keeps:
            return False
        model = self._position.model
        try:
            storage.write(state, model, self._plan, generations.make_state_folder())
        except Exception as error:
            log.warning(
                f"step {state.step} could not be kept for the next generation: {error}"
            )
            generations.remove_state()
            return False
        return True

    def taken(self) -> None:
        """Remove the kept state, because every rank has the state to start from."""
        if not self.possible or not generations.number():
            return
        if self._keeps:
            generations.remove_state()
        if self._backend.rank:
            return
        if self._position.start is None:
            log.warning(
                "no host has kept the state: the training starts again at step 0"
            )
            return
        size = self._backend.size
        print(
            f"collective: generation {generations.number()}: {size} "
            f"rank{'s continue' if size > 1 else ' continues'} from step "
            f"{self._position.start.step}",
            file=sys.stderr,
            flush=True,
        )
