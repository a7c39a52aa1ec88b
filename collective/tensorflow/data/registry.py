"""Who serves data, as known to the ranks of two jobs.

Rank 0 of the compute job keeps it. All others call its methods over TCP, each connection
authenticated by the configuration file's key (``multiprocessing.managers``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from multiprocessing.managers import BaseManager
from typing import Any


class Registry:
    """Dispatchers and their workers; every method may be called by several threads.

    Methods raise IndexError where there is no dispatcher of that number, and
    TimeoutError where what they wait for was not there after ``timeout`` seconds.

    Args:
        dispatchers: How many there will be.
        workers_per_dispatcher: How many workers each will have.
    """

    def __init__(self, dispatchers: int, workers_per_dispatcher: int):
        self._addresses: list[str | None] = [None] * dispatchers
        self._workers: list[set[int]] = [set() for _ in range(dispatchers)]
        self._workers_per_dispatcher = workers_per_dispatcher
        self._ended = False
        self._changed = threading.Condition()

    def register_dispatcher(self, dispatcher_id: int, address: str) -> None:
        """Notes where a dispatcher serves; ValueError if it does elsewhere already."""
        with self._changed:
            known = self._addresses[self._checked(dispatcher_id)]
            if known not in (None, address):
                raise ValueError(
                    f"dispatcher {dispatcher_id} serves at {known} already, "
                    f"not at {address}"
                )
            self._addresses[dispatcher_id] = address
            self._changed.notify_all()

    def wait_for_dispatcher_registration(
        self, dispatcher_id: int, timeout: float
    ) -> str:
        """The address of a dispatcher, once it is known."""
        place = self._checked(dispatcher_id)
        what = f"dispatcher {dispatcher_id} did not start"
        return self._wait(lambda: self._addresses[place], timeout, what)

    def register_worker_for_dispatcher(
        self, dispatcher_id: int, worker_id: int
    ) -> None:
        """Notes that a worker of a dispatcher serves."""
        with self._changed:
            self._workers[self._checked(dispatcher_id)].add(worker_id)
            self._changed.notify_all()

    def wait_for_dispatcher_worker_registration(
        self, dispatcher_id: int, timeout: float
    ) -> None:
        """Returns when all workers of a dispatcher serve."""
        place = 0 if len(self._workers) == 1 else self._checked(dispatcher_id)
        wanted = self._workers_per_dispatcher
        what = f"dispatcher {place} has fewer than {wanted} workers"
        self._wait(lambda: len(self._workers[place]) >= wanted, timeout, what)

    def shutdown(self) -> None:
        """Lets every worker end."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_for_shutdown(self) -> None:
        """Returns after ``shutdown``."""
        self._wait(lambda: self._ended, None, "")

    def _checked(self, dispatcher_id: int) -> int:
        if not 0 <= dispatcher_id < len(self._addresses):
            raise IndexError(
                f"there is no dispatcher {dispatcher_id}: they are numbered from 0 to "
                f"{len(self._addresses) - 1}"
            )
        return dispatcher_id

    def _wait(self, until: Callable[[], Any], timeout: float | None, what: str) -> Any:
        with self._changed:
            if not (result := self._changed.wait_for(until, timeout)):
                raise TimeoutError(f"{what} within {timeout} s")
            return result


def serve(registry: Registry, key: bytes) -> int:
    """Serves a registry in a thread until the process ends; returns the port."""

    class Server(BaseManager):
        """Hands out this one registry."""

    Server.register("registry", callable=lambda: registry)
    server = Server(("", 0), key).get_server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return int(server.address[1])  # type: ignore[index]


class _Client(BaseManager):
    """Connects to a registry."""


_Client.register("registry")


def connect(addresses: Sequence[tuple[str, int]], key: bytes) -> Any:
    """The registry at the first address that answers; ConnectionError if none does."""
    errors = []
    for address in addresses:
        manager = _Client(address, key)
        try:
            manager.connect()
        except OSError as error:
            errors.append(f"{address[0]}:{address[1]}: {error}")
            continue
        return manager.registry()  # type: ignore[attr-defined]
    raise ConnectionError("no compute service answers at " + "; ".join(errors))
