"""Process sets: even and odd ranks each reduce among themselves (2 ranks or more)."""

import horovod.tensorflow as hvd
import tensorflow as tf

hvd.init(process_sets="dynamic")

# Every rank makes both sets, in this order, and uses the set that contains it.
even = hvd.add_process_set(range(0, hvd.size(), 2))
odd = hvd.add_process_set(range(1, hvd.size(), 2))
mine = even if even.included() else odd

value = tf.constant(10.0 + hvd.rank())
total = hvd.allreduce(value, op=hvd.Sum, process_set=mine)
assert float(total) == sum(10.0 + rank for rank in mine.ranks)

everyone = hvd.allgather(tf.reshape(total, [1]))
if hvd.rank() == 0:
    print(f"process_sets: {mine} has the sum {float(total)}; all: {everyone.numpy()}")
