"""Benchmark of the collectives: ``python -m collective.launch -np 2 python -m collective.bench``."""
