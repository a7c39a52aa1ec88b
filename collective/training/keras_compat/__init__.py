"""Everything the project takes from inside Keras, in one place.

The step needs three things that Keras has no public function for: to switch off the
gradient sum inside its optimizers (our gradients are summed already), to see a loss as a
sum and a weight instead of a mean, and to run a metric without touching its variables.
Checkpoints need a fourth: to write earlier values of the variables to Keras' file. Each is
a few lines against Keras' source, and each has a test in
``tests/training/keras_compat/test_keras_compat.py`` that fails when Keras changes.

The functions of these files are used under this package's name. ``private_names`` has the
names that they take, and compares Keras with them first.
"""

# ruff: noqa: F403
from collective.training.keras_compat import private_names as private_names  # isort: skip
from collective.training.keras_compat.calls import *
from collective.training.keras_compat.data import *
from collective.training.keras_compat.distribution import *
from collective.training.keras_compat.eager_draws import *
from collective.training.keras_compat.entry_points import *
from collective.training.keras_compat.layers import *
from collective.training.keras_compat.model import *
from collective.training.keras_compat.one_copy import *
from collective.training.keras_compat.optimizers import *
from collective.training.keras_compat.replica_draws import *
from collective.training.keras_compat.seeds import *
from collective.training.keras_compat.tracing import *
from collective.training.keras_compat.weights_file import *
from collective.training.keras_compat.whole_variables import *
