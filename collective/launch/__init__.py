"""``python -m collective.launch``, also ``collectiverun``: starts the ranks of a job.

Begin with ``__main__``: it parses the command line into ``options.LaunchOptions``, places
the ranks on hosts, and runs a ``supervisor.Supervisor``: that of ``single_host`` starts the
ranks itself, that of ``mpirun`` starts mpirun, and ``restarting`` runs one or the other
again when the hosts change.
"""
