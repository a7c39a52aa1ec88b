"""Jobs in the tasks of a Spark stage: ``run`` and ``run_elastic``, as ``horovod.spark``.

Spark starts one task for each rank, all at once (``stage``). The first task of each node runs
that node's agent (``collective.launch.agents``), which starts the ranks there; the tasks
return the ranks' results. Begin reading at ``job``.
"""

from collective.spark.job import run, run_elastic

__all__ = ["run", "run_elastic"]
