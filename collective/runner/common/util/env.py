"""``horovod.runner.common.util.env``: the variables that a launcher has set."""

from collective.environment import detect


def get_env_rank_and_size() -> tuple[int, int]:
    """Return rank and number of ranks before ``init()``; (0, 1) without a launcher."""
    found = detect()
    return found.rank, found.size
