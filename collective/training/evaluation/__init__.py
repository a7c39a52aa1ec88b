"""``collective.evaluate`` and ``collective.predict``, and the validation of ``fit``.

``evaluation`` runs Keras' ``test_step``, partitioned, over a data set: loss and metrics do
not depend on the number of replicas.
"""
