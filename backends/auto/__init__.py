"""``--backend auto``: the backend that sums this model's gradients fastest here.

Begin with ``choose``, which decides. ``probe`` times a backend in a separate job, and
``measurements`` keeps that and predicts the time of a step from it.
"""
