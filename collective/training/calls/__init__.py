"""``collective.fit``, ``evaluate`` and ``predict``, and the command of ``train.py``.

``assemble`` and ``attached`` choose the step of a training and its observers; ``opening`` and
``training_data`` open backends and data. ``evaluation`` runs Keras' ``test_step``,
partitioned, over a data set: loss and metrics do not depend on the number of replicas.
"""
