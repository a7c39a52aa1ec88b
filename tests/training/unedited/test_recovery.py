"""The reaction of ranks to a call that a death has interrupted, and its order."""

from __future__ import annotations

import pytest

from collective.backends.capabilities import Elastic
from collective.training.unedited import recovery
from collective.training.unedited.recovery import decide

WORKS, TRAINS, ENDED = range(3)
REPEAT, DONE = recovery._Repeat, recovery._Ended


@pytest.mark.parametrize(
    "mine, others, outside, wanted",
    [
        # All are in the same call, outside of a training.
        ([3, WORKS], [[3, WORKS]], True, REPEAT),
        ([3, ENDED], [[3, WORKS]], True, REPEAT),
        ([3, WORKS], [[3, ENDED]], True, REPEAT),
        ([3, ENDED], [[3, ENDED]], True, DONE),
        # Others are in the next call: they have passed the barrier of this one.
        ([3, ENDED], [[4, WORKS], [3, ENDED]], True, DONE),
        ([4, WORKS], [[3, ENDED], [4, WORKS]], True, REPEAT),
        ([4, ENDED], [[3, ENDED]], True, REPEAT),  # only rank 0 can be so far
        # All are in a training, or at its end: it continues.
        ([3, TRAINS], [[3, TRAINS], [3, ENDED]], False, None),
        ([3, ENDED], [[3, TRAINS]], False, None),
        ([3, ENDED], [[3, ENDED], [4, WORKS]], False, DONE),
        # One rank still prepares it: no step was made.
        ([3, TRAINS], [[3, WORKS]], False, REPEAT),
        ([3, WORKS], [[3, TRAINS]], True, REPEAT),
        ([4, TRAINS], [[3, ENDED]], False, REPEAT),
        # This rank is the only one.
        ([3, TRAINS], [], False, None),
        ([3, ENDED], [], True, DONE),
    ],
)
def test_what_a_rank_does(mine, others, outside, wanted):
    assert decide(mine, [mine, *others], outside) is wanted


class Dead(Exception):
    """A rank died."""


class Changing(Elastic):
    """Each ``_regroup`` removes the first of four ranks."""

    def __init__(self) -> None:
        self.changes = 0

    def _regroup(self) -> list[int]:
        self.changes += 1
        return list(range(1, 5 - self.changes))

    def lost(self, error: BaseException) -> bool:
        return isinstance(error, Dead)

    leave = availability = _all_reduce = None


def test_a_rank_that_dies_while_the_others_agree_is_left_out_too():
    backend, agreed = Changing(), []

    def agree() -> None:
        if backend.changes < 3:
            raise Dead
        agreed.append(backend.changes)

    backend.on_change = agree
    assert backend.regroup() == [3] and agreed == [3]
    backend.on_change = None
    assert not backend.is_repeated(Dead())


def test_an_error_that_a_death_has_caused_is_one():
    backend = Changing()
    backend.on_change = lambda: None
    try:
        try:
            raise Dead
        except Dead as error:
            raise ValueError("in a layer") from error
    except ValueError as caused:
        assert backend.is_repeated(caused)
    assert not backend.is_repeated(ValueError())
