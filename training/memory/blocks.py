"""Where to cut a graph of layers into blocks, so that least memory is needed.

Between two blocks, everything that a later block needs is kept until the backward pass.
Within a block, everything is recomputed, so while it is differentiated all its tensors
are in memory. The best cuts minimise the bytes kept plus the largest block: few bytes
cross a cut (one tensor between the blocks of a residual network), and blocks are about
equally large.

Source: T. Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.
"""

from __future__ import annotations

from collections.abc import Sequence

# How many bounds on the size of a block are tried, from the largest tensor to all.
BOUNDS = 16


def cuts(sizes: Sequence[float], kept: Sequence[float]) -> list[int]:
    """Cuts a sequence of operations into blocks.

    Args:
        sizes: Bytes of each operation's outputs.
        kept: Bytes to keep if a block ends after this operation; the last is not used.

    Returns:
        The indices of the operations after which a block ends, the last one included.
    """
    if not sizes:
        return []
    largest, whole = max(max(sizes), 1.0), max(sum(sizes), 1.0)
    best: tuple[float, list[int]] | None = None
    for number in range(BOUNDS):
        bound = largest * (whole / largest) ** (number / (BOUNDS - 1))
        between, ends = _within(sizes, kept, bound * (1 + 1e-9))
        total = between + max(
            sum(sizes[start:end])
            for start, end in zip([0, *ends[:-1]], ends, strict=True)
        )
        if best is None or total < best[0]:
            best = total, [end - 1 for end in ends]
    assert best is not None
    return best[1]


def _within(
    sizes: Sequence[float], kept: Sequence[float], bound: float
) -> tuple[float, list[int]]:
    """The cuts that keep fewest bytes, with no block larger than the bound.

    Returns:
        The bytes that they keep, and where each block ends, exclusively.
    """
    # For each number of operations: the fewest bytes kept before it, and where the
    # last block before it begins.
    least: list[tuple[float, int]] = [(0.0, 0)]
    for end in range(1, len(sizes) + 1):
        inside, found = 0.0, (float("inf"), end)
        for start in range(end - 1, -1, -1):
            inside += sizes[start]
            if inside > bound:
                break
            cost = least[start][0] + (kept[start - 1] if start else 0.0)
            found = min(found, (cost, start))
        least.append(found)
    ends, end = [], len(sizes)
    while end:
        ends.append(end)
        end = least[end][1]
    return least[-1][0], ends[::-1]
