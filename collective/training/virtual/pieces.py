"""Which pieces of a global batch a process holds: arithmetic alone.

A global batch is cut into V pieces, one for each virtual replica. Replica r of N holds
pieces ``r*V//N`` to ``(r+1)*V//N``, one after the other. Sums over pieces are taken along
a binary tree over 0..V-1: a node of level l covers the pieces ``i*2^l`` to ``(i+1)*2^l``,
as far as there are any. The tree depends on V alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from collective.backends.base import Backend
from collective.training.input.plan import share


class Subtree(NamedTuple):
    """A node of the tree."""

    start: int  # the first piece that it covers, a multiple of ``2**level``
    level: int  # 0 for a leaf


@dataclass(frozen=True)
class VirtualReplicas:
    """The pieces of a global batch."""

    count: int

    @property
    def levels(self) -> int:
        """Return the levels of the tree below its root: the least l with ``2**l >= count``."""
        return (self.count - 1).bit_length()

    @property
    def root(self) -> Subtree:
        """Return the node that covers all pieces."""
        return Subtree(0, self.levels)

    def pieces(self, replicas: range, total: int) -> range:
        """Return the pieces that consecutive replicas hold.

        Args:
            replicas: Consecutive numbers, at least one.
            total: Replicas of the job, at most ``count``.
        """
        start, _ = share(self.count, replicas[0], total)
        _, stop = share(self.count, replicas[-1], total)
        return range(start, stop)

    def held(self, backend: Backend) -> range:
        """Return the pieces of this process."""
        return self.pieces(backend.local_replicas, backend.replicas)

    def subtrees(self, replica: int, total: int) -> list[Subtree]:
        """Return the fewest nodes that cover the pieces of a replica, and no others, in order.

        Only nodes whose pieces all exist count, so two nodes of a level that are
        neighbours may stay apart at the end of the tree.
        """
        pieces = self.pieces(range(replica, replica + 1), total)
        found, start = [], pieces.start
        while start < pieces.stop:
            level = 0
            while start % (2 << level) == 0 and start + (2 << level) <= pieces.stop:
                level += 1
            found.append(Subtree(start, level))
            start += 1 << level
        return found

    def all_subtrees(self, total: int) -> list[list[Subtree]]:
        """Return ``subtrees`` of each replica."""
        return [self.subtrees(replica, total) for replica in range(total)]

    def children(self, node: Subtree) -> tuple[Subtree, Subtree | None]:
        """Return the two halves of an inner node; the second is None if it has no pieces."""
        level = node.level - 1
        second = node.start + (1 << level)
        return (
            Subtree(node.start, level),
            Subtree(second, level) if second < self.count else None,
        )
