"""What the training takes from inside Keras and TensorFlow, one file for each neighbour.

``private_names`` has the names, and compares what is installed with them first. The
functions are used under this package's name; each has a test that fails when a neighbour
changes. Nothing here is about the mathematics of a step, which is Keras' own.
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
