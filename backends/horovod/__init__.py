"""Horovod as a backend, and a build of it that fits the installed TensorFlow.

``backend`` sums by Horovod's ``grouped_allreduce``; ``build`` compiles Horovod once for
each TensorFlow and ``wheel`` keeps the result.
"""
