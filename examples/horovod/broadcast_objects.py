"""Python objects and variables: broadcast, all-gathered, and exchanged by all-to-all."""

import horovod.tensorflow as hvd
import tensorflow as tf

hvd.init()

# Only rank 0 reads the settings.
settings = {"rate": 0.1, "layers": [16, 4]} if hvd.rank() == 0 else None
settings = hvd.broadcast_object(settings, root_rank=0)

names = hvd.allgather_object(f"rank {hvd.rank()}")

variable = tf.Variable([float(hvd.rank()), settings["rate"]])
hvd.broadcast_variables([variable], root_rank=hvd.size() - 1)
assert int(variable[0]) == hvd.size() - 1

# Every rank sends a different number of rows to each rank.
rows = tf.range(hvd.size()) + 10 * hvd.rank()
received, numbers = hvd.alltoall(rows, splits=[1] * hvd.size())
if hvd.rank() == 0:
    print(f"broadcast_objects: {settings} for {names}; received {received.numpy()}")
