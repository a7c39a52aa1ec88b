"""Benchmark of the collectives: ``collectiverun -np 2 python -m collective.bench``."""
