"""Models with their own ``train_step`` or ``test_step``, on any process backend.

Each replica calls the user's method on its rows. Calls that end in a sum over rows are
intercepted: gradients of weights, optimizer updates, losses whose denominator differs
between replicas, metrics that are given one number a batch. What the method writes
besides is found in its graph (``replica.py``) and summed at the end of the step
(``step.py``). Before the first update, ``check.py`` runs the method on a few rows in one
piece and in several, and refuses what does not agree. Begin with ``step.py``.
"""
