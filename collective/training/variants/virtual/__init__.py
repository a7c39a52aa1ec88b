"""Sums of virtual replicas in the step of parts; ``collective.training.virtual`` has the rest."""
