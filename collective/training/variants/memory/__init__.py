"""Training with less memory: ``recompute`` computes blocks of layers twice.

``partitioned`` has the update of variables that tensor parallelism cuts.
"""
