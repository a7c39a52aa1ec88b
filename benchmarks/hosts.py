"""Compares all-reduce between two hosts with MPI_Allreduce and with the capacity of TCP.

    python -m tests.hosts.lab --hosts 2 --slots 1 --rate 10gbit \
        python benchmarks/hosts.py --gigabits 10

Contestants take turns. A time is the median of the slowest rank's times; so is the time of a
core that it needed. The wire bound is 2(n-1)/n of the message at the given rate. In ``tcp``
the two ranks send each other the bytes of that bound through one socket, with a thread for
each direction: it sums nothing, and no all-reduce over this network is faster.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import workloads

import collective
from collective.bench.measure import Bench, Subject
from collective.bench.peers import mpi

ANYWHERE = ("10.77.0.254", 9)  # shows this host's address; nothing is sent


class Tcp:
    """A socket between ranks 0 and 1 that carries bytes in both directions."""

    def __init__(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(ANYWHERE)
            address = probe.getsockname()[0]
        server = socket.create_server((address, 0))
        mine = np.array([*map(int, address.split(".")), server.getsockname()[1]])
        *parts, port = collective.allgather(mine.reshape(1, -1))[0]
        if collective.rank() == 0:
            self.socket, _ = server.accept()
        else:
            self.socket = socket.create_connection(
                (".".join(map(str, parts)), int(port))
            )
        server.close()

    def run(self, data: np.ndarray, incoming: np.ndarray) -> None:
        """Send all of ``data`` and receive as many bytes."""
        sender = threading.Thread(target=self.socket.sendall, args=(data,))
        sender.start()
        view = memoryview(incoming).cast("B")
        while view:
            view = view[self.socket.recv_into(view) :]
        sender.join()


def main() -> None:
    """Measure and print the times."""
    parser = workloads.parser(__doc__)
    parser.add_argument("--bytes", type=int, default=16 << 20)
    parser.add_argument("--gigabits", type=float, required=True, help="of each link")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--algorithms", default="auto")
    options = parser.parse_args()
    collective.init()
    size, rank = collective.size(), collective.rank()
    moved = 2 * (size - 1) * options.bytes // size
    contestants: dict[str, Callable[[], object]] = {}
    if size == 2:
        tcp, data = Tcp(), np.ones(moved, np.uint8)
        incoming = np.empty_like(data)
        contestants["tcp"] = lambda: tcp.run(data, incoming)
    for name in options.algorithms.split(","):
        bench = Bench(Subject("allreduce", name, None, options.bytes, True))
        assert bench.check() == 0, name
        contestants[name] = lambda b=bench: b.time(b.source, b.target, 1, 1)
    version, timer = mpi()
    contestants["MPI_Allreduce"] = lambda: timer(bench.source, bench.target, 1, 1)
    found = workloads.take_turns(
        {name: partial(timed, run) for name, run in contestants.items()},
        options.rounds,
    )
    if rank == 0:
        bound = moved / (options.gigabits * 1e6 / 8)
        print(f"{options.bytes} bytes, {size} ranks, {version}; bound {bound:.1f} ms")
        print(
            f"{'ms':>16} {'best':>8} {'median':>8} {'of a core':>10} {'best/bound':>11}"
        )
        for name, times in found.items():
            best, (median, core) = np.min(times, axis=0)[0], np.median(times, axis=0)
            over = best / bound
            print(f"{name:>16} {best:8.1f} {median:8.1f} {core:10.1f} {over:11.3f}")


def timed(run: Callable[[], object]) -> np.ndarray:
    """Return the milliseconds of the slowest rank, and of a core that it needed."""
    collective.barrier()
    start = np.array([time.perf_counter(), time.process_time()])
    run()
    end = np.array([time.perf_counter(), time.process_time()])
    return 1e3 * collective.allreduce(end - start, collective.Max)


if __name__ == "__main__":
    main()
