"""``horovod.common``: the part of Horovod's interface without TensorFlow."""
