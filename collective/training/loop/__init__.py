"""Epochs and steps of a training, and the calls between them.

Begin with ``observed_fit``, which has Keras' own ``fit`` call an ``observer`` at fixed
points.
``position`` records where a training stands and ``state`` all that the next step depends
on. ``callbacks`` calls Keras' callbacks, ``progress`` and ``summary`` show the training to
a user, and ``result`` is the return value of ``fit``.
"""
