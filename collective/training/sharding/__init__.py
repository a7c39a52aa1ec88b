"""Variables of which each rank has a shard, and how code sees them whole.

``optimizer_slots`` are those of a sharded optimizer. ``shards`` cuts and gathers a
variable; by ``whole`` a checkpoint, a saved model and a callback see it whole.
``training.partition.rules.owned`` has the rules of the step for them.
"""
