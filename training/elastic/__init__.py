"""Membership changes while a training runs: ranks die, leave or join.

Begin with ``reconfigure``: the loop is an attempt that is repeated after each change.
``control_messages`` announces changes within the step's own all-reduce;
``state_handoff`` keeps the state between two generations of a job.
"""
