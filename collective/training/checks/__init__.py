"""Checks before and during a training.

``refusals`` come before the first step, ``finite`` in each, and ``replicas`` compares the
models that the ranks hold.
"""
