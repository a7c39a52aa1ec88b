"""Horovod's own tests and examples, run on this project: ``python -m`` this package."""
