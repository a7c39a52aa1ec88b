"""Training with less memory: a sharded optimizer.

``sharded_optimizer`` gives each rank a
shard of the optimizer's state; ``partitioned`` has what it shares with tensor
parallelism, and ``shards`` how variables are cut and gathered.
"""
