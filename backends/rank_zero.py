"""Refuses collectives in code that only rank 0 runs, where they would never end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from collective.errors import CollectiveError


class RankZeroGuard:
    """Part of every backend. The subclass has ``size``, the number of processes."""

    size: int
    _rank_zero_code = ""

    def require_all_ranks(self) -> None:
        """Does nothing unless this is code that runs on rank 0 only.

        Raises:
            CollectiveError: There, because no other rank would take part.
        """
        if self._rank_zero_code:
            raise CollectiveError(
                f"a collective was called from {self._rank_zero_code}, "
                "which runs on rank 0 only; the other ranks would wait for ever",
                hint="call it on every rank, outside callbacks",
                everywhere=False,
            )

    @contextlib.contextmanager
    def only_rank_zero(self, what: str) -> Iterator[None]:
        """Makes collectives raise at once inside code that runs on rank 0 only.

        Args:
            what: The code, as the error names it.
        """
        self._rank_zero_code = what if self.size > 1 else ""
        try:
            yield
        finally:
            self._rank_zero_code = ""
