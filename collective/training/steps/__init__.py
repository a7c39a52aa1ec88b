"""The function of a batch: what this project puts in the place of Keras' step.

Begin with ``batch_function``, which Keras' own loop calls once for each batch. It chooses
a ``program`` by the shapes of the batch (``leaves``): the step as Keras traces it,
partitioned by rows and emitted for this process; before that, ``mesh`` has the passes over
the model axes, of variables that ranks hold in parts. ``settings`` is what all programs of a
training share: the backend and the options.

The loop of ``collective.fit`` has steps of three kinds, of which ``choose_step`` makes one:
``partitioned_step``, ``own_rows_step`` (``own_batches`` says when) and ``whole_step``.
"""
