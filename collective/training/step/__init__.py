"""Parts of steps: sums, values that are not finite, rows, and the state of layers.

``reduction`` sums many tensors in one all-reduce, ``finite`` finds a loss or a gradient that
is not finite, ``rows`` has the rows of a batch as trees of tensors, and ``layer_state`` the
means of what replicas with batches of their own write.
"""
