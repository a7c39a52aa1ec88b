"""torchrun."""

from __future__ import annotations

from collective.environment.launcher import Launcher


class TorchRun(Launcher):
    """torchrun. CI systems may set RANK too, so MASTER_ADDR must be set as well.

    A ``GROUP`` is what one agent started.
    """

    name = "torchrun"
    needs = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
    local = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    across = ("GROUP_RANK", "GROUP_WORLD_SIZE")
