"""``horovod.tensorflow.mpi_ops``: the operations, and this process' place in the job."""

from collective.tensorflow import *  # noqa: F403
