"""Jobs that Ray places: ``run`` calls one function, ``RayExecutor`` is Horovod's interface.

An actor holds the resources of each rank (``placement``, ``worker``). The first actor of each
node runs that node's agent (``collective.launch.agents``), which starts the ranks there.
Elastic jobs (``elastic``, ``elastic_executor``) have actors that come and go (``holders``).
Begin reading at ``job``.
"""

from collective.ray.executor import RayExecutor
from collective.ray.job import run

__all__ = ["RayExecutor", "run"]
