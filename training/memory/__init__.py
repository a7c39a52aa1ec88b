"""Training with less memory: recomputed activations and a sharded optimizer.

``recompute`` cuts the layers into ``blocks``; ``sharded_optimizer`` gives each rank a
part of the optimizer state, on the variables of ``partitioned``.
"""
