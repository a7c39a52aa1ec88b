"""``keras.distribution`` on TensorFlow: a script's ``DataParallel`` is this job.

Keras has it on JAX alone. Begin with ``job_devices``: the devices of the job that a script
sees, and the distributions that it may set. Its ``fit``, ``evaluate`` and ``predict`` cut
the rows of each global batch anyway (``unedited.calls``), so data parallelism needs
no more. ``held_models`` has models of which each rank has a part.
"""
