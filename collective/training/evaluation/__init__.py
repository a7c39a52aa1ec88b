"""``collective.evaluate`` and ``collective.predict``, and the validation of ``fit``.

``exact`` evaluates loss and metrics over a data set, whatever the number of replicas.
"""
