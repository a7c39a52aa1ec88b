"""Variables of which each rank has a part, and how code sees them whole.

Begin with ``placing``: it lays out the variables that a script makes, by a layout map or by
an option. ``held`` has a variable's part, and what stands for the variable in a trace;
``mesh_ranks`` has the groups of ranks on a mesh. For ``collective.fit``, ``optimizer_slots``
are those of a sharded optimizer, ``shards`` cuts and gathers a variable, and by ``whole`` a
checkpoint, a saved model and a callback see it whole.
``training.partition.rules.owned`` has the rules of the step for pieces.
"""
