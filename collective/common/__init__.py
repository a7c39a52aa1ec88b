"""``horovod.common``: what does not depend on TensorFlow."""
