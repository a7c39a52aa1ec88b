"""Agents: whatever can start one process on each node runs a job, without ssh.

``collectiverun --agent`` runs on every node. That of node 0, the head (``head``), listens;
the others (``node``) connect to it, and both ends prove the job's secret. The head then runs
the launcher with a remote shell (``ssh``, ``shell``) that passes each command to the agent of
its node. Begin reading at ``command``::

    mpirun --exec--> ssh --Unix socket--> head ==the node's connection== node --> prted
"""
