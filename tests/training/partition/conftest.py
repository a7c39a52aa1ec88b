"""What all tests of the partition share."""

import pytest
import tensorflow as tf


@pytest.fixture(autouse=True, scope="module")
def graphs_as_made():
    """Without Grappler: hundreds of operations run three times, which it delays most.

    What it makes of partitioned graphs, the tests of whole trainings show.
    """
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
