"""``collective.fit``, ``evaluate`` and ``predict``, and the command of ``train.py``.

``keras_fit`` and ``keras_call`` call Keras' own methods, in which
``collective.training.steps`` shares each batch out; ``planned_data`` has each rank read its
own rows; ``set_options`` makes observers of the options. ``opening`` opens backends and rows, and
``fit_data`` all data of a training.
"""
