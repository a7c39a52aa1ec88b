"""Which rows make a global batch, which replica gets them, and reading them ahead.

Begin with ``plan`` (which rows, from seed, epoch and step alone) and ``pipeline`` (the
rows of this process as a ``tf.data`` pipeline). ``source`` is the interface of data
sources; ``arrays``, ``npz``, ``stream``, ``synthetic`` and ``views`` implement it.
``conversion`` makes a source of any data, ``ready_batches`` describes data that come as
batches, and ``datasets`` finds data by name.
"""
