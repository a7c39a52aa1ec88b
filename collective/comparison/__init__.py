"""The same training on every backend: compared for equality, timed, and reported.

Begin with ``runs``: it starts each run as a process of its own, the way the backend is
launched. ``trace`` records a training and ``equality`` compares two of them; ``speed``
summarizes timed runs; ``tables`` and ``plot`` present the ``results``, which are also
written as JSON.
"""
