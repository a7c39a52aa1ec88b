"""The launcher and the ranks of an elastic job: memory and signals that they share.

``membership_file`` is their shared memory, ``generations`` are the restarts of a job on
other hosts, and ``preemption`` lets a rank leave between two steps.
"""
