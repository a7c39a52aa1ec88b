"""One update: sums over this process' rows, sums over all replicas, new variables.

Begin with ``step``. ``forward`` and ``losses`` turn rows into sums of loss, weight and
metrics; ``accumulation`` adds up micro-batches; ``reduction`` sums over replicas;
``report`` is the vector that a step returns. ``inputs`` and ``rows`` are a replica's
tensors, and ``attachments`` is what else travels in its all-reduce.
"""
