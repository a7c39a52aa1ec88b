"""Model axes: the partition once more, over ranks that hold parts of the weights.

A model axis of T ranks is a batch of T rows of which each rank has one, so the rules for
rows are the rules for weights. Begin with ``axis``, the pass over one axis. ``marked`` has
what a pass leaves of its exchanges for the passes after it, ``parts`` cuts and joins values.
``suggestion`` finds layouts for a model without a map, by many ``trials``.
"""
