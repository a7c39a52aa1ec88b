"""``--backend auto``: the backend that sums this model's gradients fastest here.

``choose`` decides; ``probe`` measures, ``probe_cache`` keeps what it found, and
``prediction`` turns it into the time of a step.
"""
