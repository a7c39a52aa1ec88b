"""TF_CONFIG: Kubeflow's TFJob, Ray Train and cluster tools of TensorFlow set it."""

from __future__ import annotations

import json
from typing import Any

from collective.environment.launcher import Launcher
from collective.errors import UsageError


class TFConfig(Launcher):
    """The cluster and this process' task in it, as JSON.

    Ranks are the chief, if any, and then the workers in their order. Tasks whose
    addresses have the same host are local to each other.
    """

    name = "TF_CONFIG"
    needs = ("TF_CONFIG",)

    def started_us(self) -> bool:
        """Return whether it names several workers; one worker needs no job."""
        return bool(self.variables.get("TF_CONFIG")) and self.size() > 1

    def rank(self) -> int:
        """Return this task's rank, by ``task``."""
        config = self._config()
        try:
            kind, index = config["task"]["type"], int(config["task"]["index"])
            chiefs = len(config["cluster"].get("chief", []))
        except (KeyError, TypeError, ValueError, OverflowError):
            raise self._error("it has no task with type and index") from None
        if kind not in ("chief", "worker"):
            raise self._error(f"a task of type {kind!r} does not train")
        if not 0 <= index < (chiefs if kind == "chief" else self.size() - chiefs):
            raise self._error(f"its cluster has no {kind} {index}")
        return index if kind == "chief" else index + chiefs

    def size(self) -> int:
        """Count the chief and the workers."""
        return len(self.addresses())

    def local_rank(self) -> int:
        """Return the number of this task among those on the same host."""
        hosts, rank = self._hosts(), self.rank()
        return hosts[:rank].count(hosts[rank])

    def local_size(self) -> int:
        """Count the tasks on the same host."""
        hosts = self._hosts()
        return hosts.count(hosts[self.rank()])

    def addresses(self) -> list[str]:
        """Return the addresses of the chief and of the workers."""
        cluster = self._config().get("cluster") or {}
        try:
            found = [*cluster.get("chief", []), *cluster.get("worker", [])]
            return [str.strip(address) for address in found]
        except (AttributeError, TypeError):
            what = "its cluster is not a table of lists of addresses"
            raise self._error(what) from None

    def _hosts(self) -> list[str]:
        return [address.rpartition(":")[0] for address in self.addresses()]

    def _config(self) -> dict[str, Any]:
        try:
            config = json.loads(self.variables["TF_CONFIG"])
        except (ValueError, RecursionError) as error:
            raise self._error(f"it is not JSON: {error}") from None
        if not isinstance(config, dict):
            raise self._error("it is not a JSON object")
        return config

    def _error(self, what: str) -> UsageError:
        return UsageError(
            f"TF_CONFIG in the environment cannot be used: {what}",
            hint='export TF_CONFIG=\'{"cluster": {"worker": ["a:2222", "b:2222"]}, '
            '"task": {"type": "worker", "index": 0}}\', or unset TF_CONFIG',
        )
