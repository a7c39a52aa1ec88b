"""One rank of a compute job, which prepares data for training jobs.

    collectiverun -np 2 python -m collective.tensorflow.data.compute_worker config.json

It ends on SIGTERM or Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import collective.tensorflow as hvd
from collective.errors import CollectiveError
from collective.launch.output import print_message
from collective.tensorflow.data import compute_service, registry


def main(dispatchers: int, dispatcher_side: str, configfile: str, timeout: int) -> None:
    """Runs this rank; see ``compute_service.TfDataServiceConfig`` for the arguments.

    Raises:
        UsageError: The number of ranks is no multiple of ``dispatchers``.
    """
    hvd.init()
    compute_service.check(dispatchers, hvd.size(), dispatcher_side)
    service = config = None
    if hvd.rank() == 0:
        service = registry.Registry(dispatchers, hvd.size() // dispatchers)
        config = compute_service.make_config(
            service, dispatchers, hvd.size(), dispatcher_side, timeout
        )
        config.write(configfile)
    config = hvd.broadcast_object(config, name="TfDataServiceConfig")
    try:
        compute_service.compute_worker_fn(config)
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
