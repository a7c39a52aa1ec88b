"""Variables of which each rank has a part, and how code sees them whole.

``slots`` are those of a sharded optimizer. ``shards`` has how a variable is cut and
gathered, ``whole`` how a checkpoint, a saved model and a callback see it. What the step
makes of them: ``collective.training.partition.rules.owned``.
"""
