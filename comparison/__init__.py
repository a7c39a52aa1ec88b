"""The same training on every backend: proved equal, timed, and shown.

``compare.py`` is the command. Each run is a process of its own, started the way its
backend wants. ``trace`` and ``equality`` prove; ``speed`` times;
``figures`` and ``page`` show; ``results`` is what a program reads.
"""
