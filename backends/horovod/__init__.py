"""Horovod as a backend, and a build of it that fits the installed TensorFlow.

Begin with ``backend``, which sums by Horovod's grouped all-reduce. ``build`` compiles
Horovod once for each TensorFlow and keeps the result, ``installed`` says whether it fits,
and ``run`` is the command ``horovodrun`` of this environment.
"""
