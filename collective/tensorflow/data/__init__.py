"""``horovod.tensorflow.data``: data sets prepared by a job of their own."""
