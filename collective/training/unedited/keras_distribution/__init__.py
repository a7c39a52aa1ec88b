"""``keras.distribution`` on TensorFlow: a script's ``DataParallel`` is this job.

Keras knows it on JAX alone. Begin with ``devices``: what a script sees of the job, and
which distributions it may set. Its ``fit``, ``evaluate`` and ``predict`` cut the rows of
each global batch anyway (``unedited.keras_calls``), so data parallelism needs no more.
"""
