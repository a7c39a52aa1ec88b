"""An elastic function whose ranks change in its third batch, for two tests.

    ranks_elastic.py leave RANK...       these ranks are asked to end
    ranks_elastic.py renew FOLDER HOSTS  the job continues on these hosts

Each rank prints its sum, the number of ranks in each batch, and its own number.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import tensorflow as tf

import collective.tensorflow as hvd
from collective.elastic import generations
from tests.hosts.ranks_renewed import announce


def change(started_as: int, way: str, *words: str) -> None:
    if way == "leave" and str(started_as) in words:
        os.kill(os.getpid(), signal.SIGTERM)
    if way == "renew" and hvd.rank() == 0:
        announce(Path(words[0]), words[1])
        while not generations.restart_requested():
            time.sleep(0.01)


def main() -> None:
    hvd.init()
    started_as = hvd.rank()
    state = hvd.elastic.TensorFlowState([tf.Variable(0.0)], batch=0, sizes=[])

    @hvd.elastic.run
    def train(state):
        while state.batch < 8:
            state.variables[0].assign_add(hvd.allreduce(state.batch + 1.0))
            state.sizes = [*state.sizes, hvd.size()]
            state.batch += 1
            if state.batch == 3:
                change(started_as, *sys.argv[1:])
            state.commit()
        return float(state.variables[0])

    print(train(state), state.sizes, hvd.rank(), flush=True)


if __name__ == "__main__":
    main()
