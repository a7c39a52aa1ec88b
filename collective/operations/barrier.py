"""Barrier: no rank leaves before all ranks have entered."""

from __future__ import annotations

from collective import library
from collective.operations.call import Call, Handle
from collective.operations.kinds import Kind
from collective.process_set import ProcessSet

_KIND = int(Kind.BARRIER)


def barrier(name: str | None = None, process_set: ProcessSet | None = None) -> None:
    """Wait for every rank.

    Args:
        name: Shown in errors; must be the same on every rank.
        process_set: The ranks that take part; None for all.

    Raises:
        CollectiveError: As for ``allreduce``.
    """
    plain = library.extension().run(
        _KIND, True, [], None, 0, name, process_set, 0, -1, 0, None
    )
    if plain is None:
        Call(Kind.BARRIER, [], None, process_set=process_set, name=name).run()


def barrier_async(
    name: str | None = None, process_set: ProcessSet | None = None
) -> Handle[None]:
    """Start ``barrier``; return at once a handle to wait for."""
    return Call(Kind.BARRIER, [], None, process_set=process_set, name=name).start()
