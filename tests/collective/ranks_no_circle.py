"""Three ranks: 0 waits for the others, 1 waits for 2, which computes; then all meet."""

import time

import numpy as np

import collective

collective.init()
rank = collective.rank()
sets = [collective.ProcessSet(ranks) for ranks in ([0, 1], [1, 2], [0, 2])]


def start(number):
    return collective.allreduce_async(
        np.ones(3), collective.Sum, process_set=sets[number]
    )


if rank == 0:
    last, first = start(0), start(2)
    assert (last.wait() == 2).all() and (first.wait() == 2).all()
elif rank == 1:
    assert (start(1).wait() == 2).all()
    assert (start(0).wait() == 2).all()
else:
    time.sleep(2)
    first = start(2)
    assert (start(1).wait() == 2).all() and (first.wait() == 2).all()
collective.barrier()
