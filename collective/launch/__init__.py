"""``python -m collective.launch``, also ``collectiverun``: starts the ranks of a job.

Begin with ``__main__``: it gets ``options.LaunchOptions``, where each option is declared,
places the ranks on hosts, and runs the job. ``supervisor.Supervisor`` starts the processes,
watches them and ends them. What the end of one means is a matter of the kind of job:

- ``single_host.EndTogether``: ranks on this host; if one fails, the others are ended;
- ``elastic.ElasticRanks``: ranks on this host, which may be lost and replaced;
- ``mpirun.Mpirun``: mpirun, which starts the ranks on all hosts, each of them below a
- ``rank.RankWatch``, which reports to ``relay`` how its rank fares.

``restarting`` runs one such job after the other when the hosts change. ``agents`` runs an
ordinary launcher on clusters whose nodes have no ssh.
"""
