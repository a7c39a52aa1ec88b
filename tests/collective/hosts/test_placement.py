"""The placement of ranks on hosts."""

from __future__ import annotations

import pytest

from collective.errors import UsageError
from collective.hosts import Host, parse_list, place


def counts(hosts, size=None):
    return {host.name: host.slots for host in place(hosts, size)}


@pytest.mark.parametrize(
    "text, size, wanted",
    [
        ("a:2,b:2", 4, {"a": 2, "b": 2}),
        ("a:2,b:2", 3, {"a": 2, "b": 1}),
        ("a:2,b:2", 2, {"a": 2}),
        ("a:2,b:2", None, {"a": 2, "b": 2}),
        ("a,b", 5, {"a": 3, "b": 2}),
        ("a,b", None, {"a": 1, "b": 1}),
        ("a:1,b,c", 6, {"a": 1, "b": 3, "c": 2}),
        ("a:4,b,c", 3, {"a": 3}),
        ("a,b:3", 4, {"a": 1, "b": 3}),
    ],
)
def test_hosts_are_filled_in_their_order(text, size, wanted):
    assert counts(parse_list(text), size) == wanted


def test_more_ranks_than_a_host_can_have_are_refused_at_once():
    with pytest.raises(UsageError, match="ranks for a: at most 1000 on one host"):
        place(parse_list("a,b"), 100_000_000)


def test_too_many_ranks_are_refused():
    with pytest.raises(UsageError, match="5 ranks, but the hosts have 4 slots"):
        place(parse_list("a:2,b:2"), 5)
    with pytest.raises(UsageError, match="whose max_slots is 2"):
        place([Host("a", None, 2)], 3)
    assert counts([Host("a", None, 2)], 2) == {"a": 2}
