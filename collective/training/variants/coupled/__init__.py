"""Collectives inside the forward pass, for what couples the rows of a global batch.

The step needs none where losses and metrics are sums over rows. Two things are not:

* a loss such as Dice, or a metric such as a maximum: predictions of all replicas are
  gathered (``gather``), and each replica computes Keras' own loss and metrics of the
  whole global batch (``whole``);
* batch normalization, where the user asks for the statistics of the whole global batch
  (``batch_norm``).

``replica`` is where to begin reading: what code in a forward pass can ask of the replica
that it is traced for. ``checks`` says what of a training needs them.
"""
