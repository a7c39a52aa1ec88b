"""Keras scripts that are not edited: their ``fit``, ``evaluate`` and ``predict`` are ours.

Begin with ``distribute``, which puts our functions in the place of Keras' own. ``calls``
says which, and seeds the ranks alike; ``job`` makes all ranks call them together;
``files`` lets rank 0 alone write models, ``strategies`` takes care of a script's own
``tf.distribute`` strategy, and ``script`` runs a file as Python does.
``python -m collective.distribute`` and ``collectiverun --keras`` are made of these.
"""
