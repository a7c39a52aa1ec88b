"""The address at which the ranks of other hosts reach a rank."""

from __future__ import annotations

import pytest

from collective.errors import UsageError
from collective.net import interfaces
from collective.net.interfaces import Interface, addresses, wanted


def host(**found):
    return [Interface(name, address) for name, address in found.items()]


A = host(eth0="192.168.1.5/24", ib0="10.1.0.1/16", docker0="172.17.0.1/16")
B = host(eth0="192.168.2.6/24", ib0="10.1.0.2/16", docker0="172.17.0.1/16")
C = host(eth0="192.168.3.7/24", docker0="172.17.0.1/16")


def test_a_network_that_all_are_in():
    assert addresses([A, A, B, B], []) == ["10.1.0.1"] * 2 + ["10.1.0.2"] * 2


def test_without_one_the_first_of_each():
    found = addresses([A, B, C], [])
    assert found == ["192.168.1.5", "192.168.2.6", "192.168.3.7"]


def test_the_first_of_several_common_networks():
    one = host(a="10.1.0.1/16", b="10.2.0.1/16")
    two = host(b="10.2.0.2/16", a="10.1.0.2/16")
    assert addresses([one, two], []) == ["10.1.0.1", "10.1.0.2"]
    assert addresses([one, two], ["b"]) == ["10.2.0.1", "10.2.0.2"]
    assert addresses([one, one], [])[0] == "10.1.0.1"


def test_the_interface_that_the_user_named():
    assert addresses([A, B], ["eth0"]) == ["192.168.1.5", "192.168.2.6"]
    assert addresses([A, C], ["ib0", "eth0"])[1] == "192.168.3.7"
    with pytest.raises(UsageError, match="rank 2 has no interface ib0") as caught:
        addresses([A, A, C], ["ib0"])
    assert "eth0 (192.168.3.7)" in caught.value.message and caught.value.hint


def test_an_address_that_two_hosts_have_leads_nowhere():
    bridge = host(docker0="172.17.0.1/16")
    with pytest.raises(UsageError, match="no address of its own"):
        addresses([bridge, [*bridge, *host(eth0="10.0.0.1/8")]], [])


def test_what_the_user_named():
    assert wanted({interfaces.VARIABLE: "eth0,ib0"}) == ["eth0", "ib0"]
    assert wanted({}) == []


def test_this_host():
    for found in interfaces.interfaces():
        assert found.name and not found.host.startswith("127.")
        assert found.network.endswith("/" + found.address.partition("/")[2])
