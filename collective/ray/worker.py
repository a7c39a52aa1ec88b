"""The actor that holds a rank's resources, and the loop that passes calls to the rank."""

from __future__ import annotations

import contextlib
import socket
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import cloudpickle

from collective.environment import detect
from collective.errors import CollectiveError
from collective.launch.agents import folders, function


@dataclass(frozen=True)
class Found:
    """The place of an actor."""

    node: str  # Ray's name of the node
    head: str  # HOST:PORT, if this is the first actor of all
    gpus: list[str]

    @property
    def address(self) -> str:
        """Return the node's address."""
        return self.head.rpartition(":")[0]


class Worker:
    """Holds the resources of one rank; the first of a node runs the node's agent."""

    def __init__(self) -> None:
        self.listener: Listener | None = None
        self.rank: Connection | None = None

    def found(self) -> Found:
        """Return the place of this actor."""
        import ray

        head = f"{ray.util.get_node_ip_address()}:{function.free_port()}"
        node = ray.get_runtime_context().get_node_id()
        return Found(node, head, [str(gpu) for gpu in ray.get_gpu_ids()])

    def hold(self) -> None:
        """Block for ever: the call fails when the actor is lost."""
        threading.Event().wait()

    def set_slots(self, job: str, count: Mapping[int, int]) -> None:
        """Report to the head, which this actor runs, how many ranks each node may have."""
        folders.write_slots(folders.of(job), count)

    def run(
        self,
        job: function.FunctionJob,
        node: int,
        gpus: list[str],
        variables: dict[str, str],
    ) -> function.NodeResult:
        """Run the agent of this node to the end of the job."""
        return function.run_node(job, node, gpus, variables)

    def listen(self, job: str, index: int) -> None:
        """Prepare for the rank with this index on this node."""
        path = socket_path(folders.make(job), index)
        self.listener = Listener(str(path), "AF_UNIX")

    def accept(self) -> int:
        """Wait for the rank; return its number."""
        assert self.listener is not None, "listen() first"
        self.rank = self.listener.accept()
        return int(self.rank.recv_bytes())

    def execute(self, call: bytes) -> Any:
        """Have the rank make a call; return its result.

        Raises:
            CollectiveError: The function failed; the error has its traceback. Or the rank
                ended.
        """
        assert self.rank is not None, "accept() first"
        try:
            self.rank.send_bytes(call)
            good, result = cloudpickle.loads(self.rank.recv_bytes())
        except (EOFError, OSError):
            raise CollectiveError(
                "RayExecutor: the rank has ended",
                hint="the first error of the ranks says why; then start() again",
            ) from None
        if not good:
            raise CollectiveError(
                f"RayExecutor: {result}",
                hint="all ranks have ended: shutdown(), and start() again",
            )
        return result

    def end(self) -> None:
        """Let the rank return from ``serve``."""
        if self.rank is not None:
            with contextlib.suppress(OSError):
                self.rank.send_bytes(b"")


def socket_path(folder: Path, index: int) -> Path:
    """Return the Unix socket of a rank; nodes may share the folder's disk."""
    return folder / f"{socket.gethostname()}-{index}.socket"


def calls(rank: Connection) -> Iterator[Any]:
    """Yield the calls of this rank's actor until its end; EOFError if it was lost."""
    while call := rank.recv_bytes():
        yield cloudpickle.loads(call)


def serve(
    job: str,
    executable_cls: type | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Make the executable, and call each function with it; return at ``shutdown``.

    Raises:
        EOFError: The actor was lost.
        Exception: The error of a function that failed: the rank ends, and with it the
            job, because other ranks may wait for this one.
    """
    here = detect()
    path = socket_path(folders.make(job), here.local_rank)
    with Client(str(path), "AF_UNIX") as actor:
        executable = executable_cls(*args, **kwargs) if executable_cls else None
        actor.send_bytes(b"%d" % here.rank)
        for call in calls(actor):
            try:
                answer = cloudpickle.dumps((True, call(executable)))
            except BaseException:
                text = f"rank {here.rank} failed\n{traceback.format_exc().rstrip()}"
                actor.send_bytes(cloudpickle.dumps((False, text)))
                raise
            actor.send_bytes(answer)
