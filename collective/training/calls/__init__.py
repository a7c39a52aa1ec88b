"""``collective.fit``, ``evaluate`` and ``predict``, and the command of ``train.py``.

``keras_fit`` and ``keras_call`` call Keras' own methods, in which
``collective.training.steps`` shares each batch out; ``planned_data`` has each rank read its
own rows; ``set_options`` makes observers of the options. Where Keras' own loop cannot run,
as ``by_keras`` says, ours does: ``assemble`` and ``attached`` choose the step of a training
and its observers. ``opening`` and ``training_data`` open backends and data. ``evaluation``
runs Keras' ``test_step``, partitioned, over a data set.
"""
