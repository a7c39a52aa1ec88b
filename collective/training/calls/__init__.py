"""``collective.fit``, ``evaluate`` and ``predict``, and the command of ``train.py``.

``by_keras`` calls Keras' own methods, in which ``collective.training.steps`` shares each
batch out; ``set_options`` makes observers of the options. Where Keras' own loop cannot run,
as in elastic jobs, ours does: ``assemble`` and ``attached`` choose the step of a training
and its observers; ``opening`` and ``training_data`` open backends and data. ``evaluation``
runs Keras' ``test_step``, partitioned, over a data set: loss and metrics do not depend on
the number of replicas.
"""
