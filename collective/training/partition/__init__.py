"""A training step as Keras traces it, shared out over replicas by the rows of its batch.

Begin with ``layouts``: how a tensor lies over replicas. ``graph`` reads a traced function;
``propagation`` finds the layout of everything in it by the ``rules`` of its operations, which
make ``plans``;
``emission`` makes the graph of one process from that. ``partition`` is all three.
"""
