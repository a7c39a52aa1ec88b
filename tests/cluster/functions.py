"""What the drivers of Ray and Spark call on ranks, and how they report it."""

from __future__ import annotations


def sums(base: float) -> tuple[float, int, str]:
    import socket

    import numpy as np

    import collective

    collective.init()
    total = collective.allreduce(
        np.array([base ** collective.rank()]), op=collective.Sum
    )
    return float(total[0]), collective.rank(), socket.gethostname()


def fails() -> None:
    import collective

    collective.init()
    if collective.rank() == 1:
        raise ValueError("of rank 1")


def report(what: str, call) -> None:
    try:
        print(what, call(), flush=True)
    except Exception as error:
        print(what, type(error).__name__, str(error).replace("\n", " | "), flush=True)
