"""Names of the perturbations; ``perturbation`` implements them and imports TensorFlow."""

PERTURBATIONS = ("clip-before-sum", "mean-of-means", "dropped-rank", "flipped-bit")
