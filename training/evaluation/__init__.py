"""``collective.evaluate`` and ``collective.predict``, and the validation of ``fit``.

``exact`` evaluates loss and metrics over a data set, whatever the number of replicas;
``batchwise`` does so a batch at a time, for hooks of callbacks. ``inference`` is what
``evaluate`` and ``predict`` share.
"""
