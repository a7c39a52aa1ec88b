"""The ways a training can be made wrong on purpose, by name.

What each does is in ``perturbation``, which imports TensorFlow.
"""

PERTURBATIONS = ("clip-before-sum", "mean-of-means", "dropped-rank", "flipped-bit")
