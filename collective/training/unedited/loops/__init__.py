"""Training loops of a script's own, on every rank: ``--keras --loops``.

A loop runs whole on every rank, but for its steps: the code in which a ``GradientTape``
computes gradients from a batch. A step is a ``tf.function`` that takes gradients
(``functions``), the statements from ``with tf.GradientTape()`` to the last use of the tape
(``segments``), or one of Keras' ``..._on_batch`` (``on_batch``). Each rank runs a step on
its rows of the batch (``rows``), and what leaves it is that of the whole batch (``step``,
``hooks``): so everything around it is what one process computes. The first call of a step
is compared with one process (``check``). Begin with ``step``.

What every rank runs whole, ``notice`` says by its place: with ``--loops`` gradients outside
of a step, without it the first update of each loop.
"""

from __future__ import annotations

from collective.errors import UsageError
from collective.training.unedited.job import Job
from collective.training.unedited.loops.functions import replace_functions
from collective.training.unedited.loops.on_batch import replace_on_batch
from collective.training.unedited.loops.segments import rewrite_modules
from collective.training.unedited.loops.writes import watch_metrics


def distribute_loops(job: Job) -> None:
    """From now on, steps of the script's loops run on each rank's rows.

    Of modules that are loaded later, the script first.

    Raises:
        UsageError: The backend is not one replica in each process.
    """
    if len(job.backend.local_replicas) != 1 or hasattr(job.backend, "strategy"):
        raise UsageError(
            f"--loops needs a backend with one replica in each process, and "
            f"{job.backend.name!r} has a strategy of its own",
            hint="--backend native or mpi",
        )
    watch_metrics(job)
    replace_functions(job)
    rewrite_modules(job)
    replace_on_batch(job)
