"""Training with less memory: recomputed activations and a sharded optimizer.

``recompute`` computes blocks of layers twice. ``sharded_optimizer`` gives each rank a
shard of the optimizer's state; ``partitioned`` has what it shares with tensor
parallelism, and ``shards`` how variables are cut and gathered.
"""
