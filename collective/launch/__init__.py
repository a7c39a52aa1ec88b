"""``python -m collective.launch``, also ``collectiverun``: starts the ranks of a job.

Begin with ``__main__``: it gets ``options.LaunchOptions``, where each option is declared,
places the ranks on hosts, and runs the job. ``supervisor.Supervisor`` starts the processes,
watches them and ends them. The kind of job decides what follows when a process ends:

- ``single_host.EndTogether``: ranks on this host; if one fails, the others are ended;
- ``elastic.ElasticRanks``: ranks on this host, which may be lost and replaced;
- ``mpirun.Mpirun``: mpirun, which starts the ranks on all hosts, each under a
- ``rank.RankWatch``, which reports the state of its rank to ``relay``.

``restarting`` runs one such job after another when the hosts change. ``agents`` runs an
ordinary launcher on clusters whose nodes cannot be reached by ssh.
"""
