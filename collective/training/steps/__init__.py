"""The function of a batch: what this project puts in the place of Keras' step.

Begin with ``batch_function``, which Keras' own loop calls once for each batch. It chooses
a ``program`` by the shapes of the batch (``leaves``): the step as Keras traces it,
partitioned by rows and emitted for this process. ``settings`` is what all programs of a
training share: the backend and the options.
"""
