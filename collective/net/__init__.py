"""The network of this host, and what must stay secret or private.

``interfaces`` finds the addresses at which hosts reach each other, ``shared_secret`` proves
to each end of a connection that the other belongs to the job, ``callers`` bounds those that
have yet to prove it, and ``private_files`` makes and checks files that only this user can
write.
"""
