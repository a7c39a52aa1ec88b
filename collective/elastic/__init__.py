"""What the launcher and the ranks of an elastic job share.

``membership_file`` is their shared memory, ``generations`` are the restarts of a job on
other hosts, and ``preemption`` lets a rank leave between two steps.
"""
