"""Membership changes while a training runs: ranks die, leave or join.

Begin with ``units``: it repeats what a death has interrupted, in unedited scripts and,
by ``fit_units``, in ``collective.fit``. There ``fit_membership`` lets ranks leave and join
between two steps. ``state_handoff`` keeps the state between two generations of a job.
"""
