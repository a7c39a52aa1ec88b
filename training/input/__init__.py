"""Which rows make a global batch, whose they are, and reading them ahead of the step.

Begin with ``plan`` (which rows, from seed, epoch and step alone) and ``pipeline`` (this
process' share of them as a ``tf.data`` pipeline). ``source`` is the interface of where
rows come from; ``arrays``, ``npz``, ``tfrecords``, ``images``, ``stream`` and
``synthetic`` implement it. ``datasets`` finds data by name.
"""
