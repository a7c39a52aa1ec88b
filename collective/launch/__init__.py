"""``python -m collective.launch``, also ``collectiverun``: starts the ranks of a job.

Begin with ``__main__``: it parses the command line into ``options.LaunchOptions``, places
the ranks on hosts, and hands both to a launcher (``launcher.py``): ``single_host`` starts
the ranks itself, ``multi_host`` composes a command of mpirun, and ``restarting`` runs one
or the other again when the hosts change. All three start processes by ``supervisor``.
"""
