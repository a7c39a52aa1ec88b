"""``python -m collective.launch``, also ``collectiverun``: start the ranks of a job.

Begin with ``__main__``. It reads the command line once (``command_line``) into the frozen
``options.LaunchOptions``, where each option is declared. ``choosing`` returns the kind of
job, and ``job.run`` starts, watches and ends it:

- ``single_host.OnThisHost``: ranks on this host. ``single_host.EndTogether`` ends all ranks
  if one fails; ``elastic.ElasticRanks`` may lose ranks and replace them;
- ``mpirun.Mpirun``: mpirun, which starts the ranks on all hosts, each under a
  ``rank.RankWatch``, which reports the state of its rank to ``relay``;
- ``restarting.RestartingLauncher``: one such job after another, when the hosts change;
- ``agents``: an ordinary launcher on a cluster whose nodes cannot be reached by ssh;
- ``choosing.DryRun``: no job; its commands are printed.

In each job, ``supervisor.Supervisor`` starts the processes, watches them and ends them, and
asks the job what follows when a process ends.
"""
