"""The parts that all three kinds of steps are built from.

``rows`` and ``inputs`` are the tensors of a replica, ``reduction`` sums many tensors in one
all-reduce, and ``report_layout`` is the vector that a step returns. ``attachments`` has
further values that travel in the all-reduce of a step, and ``finite`` finds a loss or a
gradient that is not finite. The steps are ``steps.partitioned_step``,
``steps.whole_step`` and ``steps.own_rows_step``.
"""
