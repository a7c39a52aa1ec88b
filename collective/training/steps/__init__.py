"""The function of a batch: what this project puts in the place of Keras' step.

Begin with ``batch_function``, which Keras' own loop calls once for each batch. It chooses
a ``program`` by the shapes of the batch (``leaves``). Mostly it is a ``partitioned_program``:
the step as Keras traces it, partitioned by rows and emitted for this process; before that,
``mesh`` has the passes over the model axes, of variables that ranks hold in parts. Where each
replica has a batch of its own (``own_batches``), it is an ``own_rows_program``. ``settings``
is what all programs of a training share: the backend and the options. ``distributed`` is the
context in which Keras' loops call all this; ``whole`` has the steps of models that run
eagerly, and ``planned_batches`` reads rows by number.
"""
