"""``--backend auto``: the backend that sums this model's gradients fastest here.

Begin with ``choose``, which decides. ``probe`` times a backend in a separate job,
``probe_cache`` keeps the measurements, ``prediction`` turns them into the time of a step,
and ``forked`` finds the sizes of the model's gradients.
"""
