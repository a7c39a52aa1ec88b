"""Which rows make a global batch, which replica gets them, and reading them ahead.

Begin with ``plan`` (which rows, from seed, epoch and step alone) and ``pipeline`` (this
process' share of them as a ``tf.data`` pipeline). ``source`` is the interface of data
sources; ``arrays``, ``npz``, ``images``, ``stream`` and ``synthetic``
implement it. ``datasets`` finds data by name.
"""
