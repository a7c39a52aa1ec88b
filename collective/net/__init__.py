"""The network of this host, and data that must stay secret or private.

``interfaces`` finds the addresses at which hosts reach each other, ``shared_secret`` proves
to each end of a connection that the other belongs to the job, ``callers`` bounds the
connections that have not proved it yet, and ``private_files`` makes and checks files that only
this user can write.
"""
