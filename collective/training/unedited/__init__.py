"""Keras scripts that are not edited: their ``fit``, ``evaluate`` and ``predict`` are ours.

Begin with ``distribute``, which replaces Keras' own methods. ``keras_calls`` says by which
functions, and seeds the ranks alike; ``script_job`` makes all ranks call them together;
``files`` lets rank 0 alone write models, ``strategies`` replaces a script's own
``tf.distribute`` strategy, and ``script`` runs a file as Python does.
``python -m collective.distribute`` and ``collectiverun --keras`` are made of these.
"""
