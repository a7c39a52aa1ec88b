"""horovodrun without MPI (``--gloo``); with MPI it sets no variable of its own."""

from collective.environment.base import Launcher


class HorovodGloo(Launcher):
    """``HOROVOD_RANK`` and its kin."""

    name = "horovodrun"
    needs = ("HOROVOD_RANK", "HOROVOD_SIZE")

    def rank(self) -> int:
        """``HOROVOD_RANK``."""
        return self.number("HOROVOD_RANK")

    def size(self) -> int:
        """``HOROVOD_SIZE``."""
        return self.number("HOROVOD_SIZE")

    def local_rank(self) -> int:
        """``HOROVOD_LOCAL_RANK``."""
        return self.number("HOROVOD_LOCAL_RANK", super().local_rank())

    def local_size(self) -> int:
        """``HOROVOD_LOCAL_SIZE``."""
        return self.number("HOROVOD_LOCAL_SIZE", self.size())

    def cross(self) -> tuple[int, int]:
        """``HOROVOD_CROSS_RANK`` and ``HOROVOD_CROSS_SIZE``."""
        if "HOROVOD_CROSS_RANK" not in self.variables:
            return -1, -1
        return self.number("HOROVOD_CROSS_RANK"), self.number("HOROVOD_CROSS_SIZE")
