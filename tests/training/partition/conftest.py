"""Shared by all tests of the partition."""

import pytest
import tensorflow as tf


@pytest.fixture(autouse=True, scope="module")
def graphs_as_made():
    """Disable Grappler, which takes most of the time of graphs that run three times.

    The tests of whole trainings show its effect on partitioned graphs.
    """
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
