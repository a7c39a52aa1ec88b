"""Membership changes while a training runs: ranks die, leave or join.

Begin with ``membership``: it repeats the loop after each change. ``control_messages``
announces changes within the step's own all-reduce, and ``state_handoff`` keeps the
state between two generations of a job.
"""
