"""Agents run a job without ssh, on any cluster that can start one process on each node.

``collectiverun --agent`` runs on every node. The agent of node 0 is the head (``head``) and
listens; the others (``node``) connect to it, and both ends prove that they know the job's
secret. The head then runs the launcher with a remote shell (``ssh``, ``shell``) that passes
each command to the agent of its node. Begin reading at ``command``::

    mpirun --exec--> ssh --Unix socket--> head ==the node's connection== node --> prted
"""
