"""What listens is not what is told: addresses of this host, and those that others may dial."""

from __future__ import annotations

import ipaddress
import subprocess
import sys

import pytest

from aiograd.rpc.options import Options
from aiograd.rpc.transport import interfaces
from aiograd.rpc.transport.interfaces import (
    Interface,
    ListenSpec,
    locality,
    parse_listen,
    routable,
    route_to,
    told_addresses,
)


def host(*pairs: str) -> list[Interface]:
    split = [pair.split("=") for pair in pairs]
    return [Interface(name, ipaddress.ip_address(address)) for name, address in split]


HOST = host("lo=127.0.0.1", "docker0=172.17.0.1", "eth0=10.0.0.7", "eth1=192.168.1.7", "lo=::1")


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("0.0.0.0:0", ListenSpec(host="0.0.0.0")),
        ("[::]:7", ListenSpec(host="::", port=7)),
        ("node1:29500", ListenSpec(host="node1", port=29500)),
        ("eth1", ListenSpec(interface="eth1")),
        ("lo:7", ListenSpec(interface="lo", port=7)),
        ("10.0.0.0/8", ListenSpec(network="10.0.0.0/8")),
        ("10.0.0.7/8", ListenSpec(network="10.0.0.0/8")),
        ("fd00::/8", ListenSpec(network="fd00::/8")),
    ],
)
def test_listen_is_an_address_an_interface_or_a_network(text, spec):
    assert parse_listen(text) == spec
    assert Options(listen=text).listen == text


@pytest.mark.parametrize("text", ["", ":", "10.0.0.7", "eth1:x", "a b", "10.0.0.0/99", "x:70000"])
def test_a_listen_that_cannot_be_read_is_refused_where_it_is_written(text):
    with pytest.raises(ValueError, match=r"10\.0\.0\.0/8"):
        Options(listen=text)


def test_a_network_or_an_interface_chooses_the_address_of_this_host():
    assert parse_listen("192.168.0.0/16").candidates(HOST) == ["192.168.1.7"]
    assert parse_listen("eth0").candidates(HOST) == ["10.0.0.7"]
    assert parse_listen("8.0.0.0/8").candidates(HOST) == []


@pytest.mark.parametrize("text", ["127.0.0.1:7", "0.0.0.0:7", "localhost:7", "[::]:7", "[::1]:7"])
def test_neither_loopback_nor_any_address_is_advertised(text):
    with pytest.raises(ValueError, match="means themselves"):
        Options(advertise=text)


@pytest.mark.parametrize("text", ["name", "name:", ":7", "name:x", "name:70000"])
def test_an_advertised_address_has_a_name_and_a_port(text):
    with pytest.raises(ValueError, match="name:port"):
        Options(advertise=text)


@pytest.mark.parametrize(
    ("ports", "error"),
    [((2, 1), ValueError), ((0, 9), ValueError), ((1, 70000), ValueError), (7, TypeError)],
)
def test_ports_are_a_range(ports, error):
    with pytest.raises(error, match="ports"):
        Options(ports=ports)
    assert Options(ports=[20000, 20100]).ports == (20000, 20100)


def test_a_listener_at_all_addresses_tells_those_that_others_can_dial(monkeypatch):
    monkeypatch.setattr(interfaces, "route_to", lambda address: "192.168.1.7")
    told = told_addresses("tcp:0.0.0.0:5", None, HOST)
    assert told == ("tcp:192.168.1.7:5", "tcp:10.0.0.7:5")  # the default route first, no docker0


def test_a_bridge_of_containers_is_told_if_there_is_nothing_else(monkeypatch):
    monkeypatch.setattr(interfaces, "route_to", lambda address: None)
    only = host("lo=127.0.0.1", "docker0=172.17.0.1")
    assert [str(each.address) for each in routable(only)] == ["172.17.0.1"]


def test_an_advertised_address_replaces_every_tcp_address_and_keeps_unix():
    assert told_addresses("tcp:10.0.0.7:5", ("gate", 0), HOST) == ("tcp:gate:5",)
    assert told_addresses("tcp:0.0.0.0:5", ("gate", 99), HOST) == ("tcp:gate:99",)
    assert told_addresses("unix:/x", ("gate", 99), HOST) == ("unix:/x",)
    assert told_addresses("tcp:10.0.0.7:5", None, HOST) == ("tcp:10.0.0.7:5",)


def test_this_host_has_a_loopback_and_knows_the_way_to_it():
    assert ipaddress.ip_address("127.0.0.1") in {each.address for each in interfaces.interfaces()}
    assert route_to("127.0.0.1") == "127.0.0.1"


def test_processes_of_one_network_namespace_have_one_locality():
    code = "from aiograd.rpc.transport.interfaces import locality; print(locality())"
    command = [sys.executable, "-c", code]
    other = subprocess.run(command, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == locality()
