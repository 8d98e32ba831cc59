"""Where workers listen, and what they tell others."""

from __future__ import annotations

from dataclasses import replace

import pytest

import aiograd as ag
from aiograd.cluster.joining import listening
from aiograd.errors import RpcError
from aiograd.rpc.options import Options
from tests.rpc.transport.test_interfaces import HOST

QUICK = Options(grace=2.0, timeout=10.0, secret=b"a secret of the cluster")


@pytest.fixture
def place(tmp_path):
    return f"unix:{tmp_path}/meet"


@pytest.mark.parametrize(
    ("location", "known", "expected"),
    [
        ("127.0.0.1:5", [], ("127.0.0.1", 5)),  # on purpose
        ("localhost:5", [], ("localhost", 5)),
        ("node1:5", ["10.0.0.7"], ("10.0.0.7", 5)),
        ("node1:5", ["127.0.1.1"], ("0.0.0.0", 5)),  # /etc/hosts of Debian
        ("node1:5", [], ("0.0.0.0", 5)),  # DNS does not know it yet
        ("node1:5", ["8.8.8.8"], ("0.0.0.0", 5)),  # translated, or of the last pod of that name
        ("0.0.0.0:5", [], ("0.0.0.0", 5)),
    ],
)
async def test_rank_0_listens_where_its_name_should_lead(monkeypatch, location, known, expected):
    async def resolve(name: str) -> list[str]:
        return known

    monkeypatch.setattr(listening, "interfaces", lambda: HOST)
    assert await listening.rendezvous_host(Options(), location, resolve) == expected


async def test_rank_0_on_another_host_than_the_rendezvous_says_which_addresses_it_has(monkeypatch):
    monkeypatch.setattr(listening, "interfaces", lambda: HOST)
    with pytest.raises(RpcError, match=r"8.8.8.8 is not an address of .* has 10.0.0.7"):
        await listening.rendezvous_host(Options(), "8.8.8.8:5", listening.resolve_once)
    forwarded = Options(listen="0.0.0.0:0", advertise="8.8.8.8:0")
    found = await listening.rendezvous_host(forwarded, "8.8.8.8:5", listening.resolve_once)
    assert found == ("0.0.0.0", 5)


async def test_a_coordinator_whose_name_means_loopback_here_does_not_make_us_listen_there(
    monkeypatch,
):
    async def resolve(name: str) -> list[str]:
        return ["127.0.1.1"]

    monkeypatch.setattr(listening, "interfaces", lambda: HOST)
    assert await listening.listen_host(Options(), "tcp:node1:5", resolve) == ("10.0.0.7", 0)
    assert await listening.listen_host(Options(), "tcp:127.0.0.1:5", resolve) == ("127.0.0.1", 0)


async def test_a_host_without_a_network_says_so(monkeypatch):
    async def resolve(name: str) -> list[str]:
        return ["127.0.1.1"]

    monkeypatch.setattr(listening, "interfaces", lambda: HOST[:1])
    with pytest.raises(RpcError, match=r"only loopback.*node1 is meant for several hosts"):
        await listening.listen_host(Options(), "tcp:node1:5", resolve)


async def test_a_worker_never_tells_all_addresses_or_loopback_to_others():
    options = replace(QUICK, allow_plaintext=True)
    async with ag.Worker("a", rank=0, rendezvous="0.0.0.0:0", options=options) as a:
        tcp = [each for each in a.addresses if each.startswith("tcp:")]
        assert tcp
        assert not any(host in each for each in tcp for host in ("0.0.0.0", "127.0.0.1"))


async def test_an_advertised_address_is_what_others_are_told():
    options = replace(QUICK, advertise="gate.example:7", allow_plaintext=True)
    async with ag.Worker("a", rank=0, rendezvous="0.0.0.0:0", options=options) as a:
        assert "tcp:gate.example:7" in a.addresses
        assert "tcp:gate.example:7" in a.invitation().addresses


async def test_a_worker_listens_within_the_range_of_ports(place):
    async with ag.Worker("a", rank=0, rendezvous=place, options=QUICK) as a:
        options = replace(QUICK, transport="tcp", ports=(23450, 23451))
        guests = [await ag.join(a.invitation(), options=options) for _ in range(2)]
        ports = {int(guest.addresses[0].rpartition(":")[2]) for guest in guests}
        assert ports == {23450, 23451}
        with pytest.raises(RpcError, match="no port of 23450 to 23451 is free"):
            await ag.join(a.invitation(), options=options)
        for guest in guests:
            await guest.close()


@pytest.mark.parametrize("listen", ["nope7", "203.0.113.0/24"])
async def test_an_interface_or_a_network_that_this_host_has_not_is_named(place, listen):
    async with ag.Worker("a", rank=0, rendezvous=place, options=QUICK) as a:
        options = replace(QUICK, transport="tcp", listen=listen)
        with pytest.raises(RpcError, match=f"no .*{listen}; it has .*127.0.0.1"):
            await ag.join(a.invitation(), options=options)


def test_only_a_shared_folder_or_a_word_of_the_options_makes_a_file_cross_hosts(monkeypatch):
    file = listening.Rendezvous("file", "/home/x/meet")
    monkeypatch.setattr(listening, "file_system", lambda path: "ext4")
    assert not listening.crosses_hosts(file, Options())
    assert listening.crosses_hosts(file, Options(listen="0.0.0.0:0"))
    assert listening.crosses_hosts(file, Options(allow_plaintext=True))
    monkeypatch.setattr(listening, "file_system", lambda path: "nfs4")
    assert listening.crosses_hosts(file, Options())


def test_the_file_system_of_a_path_is_that_of_its_folder():
    assert listening.file_system("/proc/self/x") == "proc"
