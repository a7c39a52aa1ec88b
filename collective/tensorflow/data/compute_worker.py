"""One rank of a compute job, which prepares data for training jobs.

    collectiverun -np 2 python -m collective.tensorflow.data.compute_worker config.json

It ends on SIGTERM or Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import collective.tensorflow as hvd
from collective.errors import CollectiveError, UsageError
from collective.launch.output import print_message
from collective.net.interfaces import interfaces
from collective.tensorflow.data import registry
from collective.tensorflow.data.compute_service import (
    TfDataServiceConfig,
    compute_worker_fn,
)

_SIDES = ("compute", "training")


def main(dispatchers: int, dispatcher_side: str, configfile: str, timeout: int) -> None:
    """Runs this rank; see ``TfDataServiceConfig`` for the arguments.

    Raises:
        UsageError: ``dispatchers`` does not divide the number of ranks, or an unknown
            side.
    """
    hvd.init()
    workers, rest = divmod(hvd.size(), max(dispatchers, 1))
    if dispatchers < 1 or rest:
        raise UsageError(
            f"{hvd.size()} ranks cannot be shared by {dispatchers} dispatchers",
            hint="-np a multiple of --dispatchers",
        )
    if dispatcher_side not in _SIDES:
        raise UsageError(
            f"--dispatcher-side {dispatcher_side}: there is no such side",
            hint=f"one of: {', '.join(_SIDES)}",
        )
    service = config = None
    if hvd.rank() == 0:
        service, key = registry.Registry(dispatchers, workers), os.urandom(32)
        port = registry.serve(service, key)
        found = {each.name: [(each.host, port)] for each in interfaces()}
        found.setdefault("lo", [("127.0.0.1", port)])
        config = TfDataServiceConfig(
            dispatchers, workers, dispatcher_side, found, key, timeout
        )
        config.write(configfile)
    config = hvd.broadcast_object(config, name="TfDataServiceConfig")
    try:
        compute_worker_fn(config)
    finally:
        if service is not None:
            service.shutdown()


def _run(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m collective.tensorflow.data.compute_worker"
    )
    add = parser.add_argument
    add("configfile", help="written for training jobs to read")
    add("--dispatchers", type=int, default=1, help="1, or one for each training rank")
    add("--dispatcher-side", default="compute", help="whose ranks: compute or training")
    add("--timeout", type=int, default=60, help="seconds for everything to start")
    parsed = parser.parse_args(arguments)
    try:
        main(**vars(parsed))
    except CollectiveError as error:
        print_message(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(_run())
