"""Epochs and steps, and what is called between them.

Begin with ``loop``, the order of things; ``observer`` is what it calls at fixed points.
``position`` is where a training stands, ``callbacks`` are Keras' callbacks, ``progress``
and ``summary`` what a user sees, ``result`` what ``fit`` returns.
"""
