"""Attributes that are replaced in one thread, while others wait."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from collective.replacements import replacing, suspended


def test_what_waits_is_as_it_was():
    owner = SimpleNamespace(name=1)
    with replacing(owner, "name", 2), replacing(owner, "name", 3):
        with suspended():
            assert owner.name == 1
        assert owner.name == 3
    assert owner.name == 1


def test_threads_that_take_turns_do_not_see_each_other():
    owner, seen = SimpleNamespace(name="plain"), []
    turns = [threading.Semaphore(0) for _ in range(2)]

    def replica(number):
        turns[number].acquire()
        with replacing(owner, "name", number):
            for _ in range(2):
                with suspended():
                    turns[1 - number].release()
                    turns[number].acquire()
                    seen.append(owner.name)
                seen.append(owner.name)
        turns[1 - number].release()

    threads = [threading.Thread(target=replica, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    turns[0].release()
    for thread in threads:
        thread.join(timeout=10)
    assert [s for s in seen if s != "plain"] == [0, 1, 0, 1]
    assert owner.name == "plain"


def test_after_an_error_nothing_is_replaced_again():
    owner = SimpleNamespace(name=1)
    with pytest.raises(ValueError), replacing(owner, "name", 2), suspended():
        raise ValueError
    assert owner.name == 1
