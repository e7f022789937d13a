"""On which interface the ranks of a group talk: the one that has their address."""

import socket

import psutil
import pytest

from encodepool_worker.shell.meeting import interface_of

FAMILIES = (socket.AF_INET, socket.AF_INET6)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1"])
def test_loopback_is_lo(host):
    assert interface_of(host) == "lo"


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "a-name.example"])
def test_an_address_of_no_interface_and_a_name_are_left_to_the_libraries(host):
    assert interface_of(host) is None


def test_every_first_address_of_this_machine_is_found():
    for name, addresses in psutil.net_if_addrs().items():
        for family in FAMILIES:
            first = next((a.address for a in addresses if a.family == family), None)
            if first is not None and not first.startswith(("127.", "::1")):
                assert interface_of(first) == name
