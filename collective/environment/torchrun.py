"""torchrun. CI systems may set RANK too, so MASTER_ADDR must be set as well."""

from collective.environment.base import Launcher


class TorchRun(Launcher):
    """``RANK``, ``WORLD_SIZE`` etc."""

    name = "torchrun"
    needs = ("RANK", "WORLD_SIZE", "MASTER_ADDR")

    def rank(self) -> int:
        """``RANK``."""
        return self.number("RANK")

    def size(self) -> int:
        """``WORLD_SIZE``."""
        return self.number("WORLD_SIZE")

    def local_rank(self) -> int:
        """``LOCAL_RANK``."""
        return self.number("LOCAL_RANK", super().local_rank())

    def local_size(self) -> int:
        """``LOCAL_WORLD_SIZE``."""
        return self.number("LOCAL_WORLD_SIZE", self.size())

    def cross(self) -> tuple[int, int]:
        """``GROUP_RANK`` and ``GROUP_WORLD_SIZE``: a group is what one agent started."""
        if "GROUP_WORLD_SIZE" not in self.variables:
            return -1, -1
        return self.number("GROUP_RANK"), self.number("GROUP_WORLD_SIZE")
