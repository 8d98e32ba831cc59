"""Workers on three hosts, as far as the kernel is concerned."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from pathlib import Path

import pytest

from tests.support.hosts import Host, Program, network, possible
from tests.support.namespaces import ip

pytestmark = [
    pytest.mark.skipif(not possible(), reason="making network namespaces takes root and `ip`"),
    pytest.mark.deadline(120),
    pytest.mark.asyncio(loop_factories=["asyncio"]),
]


@pytest.fixture
def options(tmp_path: Path) -> str:
    (tmp_path / "secret").touch(mode=0o600)
    (tmp_path / "secret").write_text(secrets.token_hex(32))
    return f"secret_file='{tmp_path}/secret', grace=2.0"  # TLS by the secret, as by default


NAMES = "return sorted(each.name for each in ag.workers())"
EVERYBODY = """
    async def name(): return ag.get_worker_info().name
    others = [each.name for each in ag.workers()]
    return [await ag.rpc_async(each, name, timeout=10) for each in others]
"""


async def test_members_on_three_hosts_call_each_other_by_addresses_that_they_can_dial(options):
    async with network(3) as hosts:
        programs = [await host.program() for host in hosts]
        place = f"{hosts[0].address}:29500"
        await programs[0].do(
            f"worker = await ag.init_rpc('a', rank=0, rendezvous='{place}',"
            f" options=ag.Options({options}))"
        )
        for program, name in zip(programs[1:], "bc", strict=True):
            await program.do(
                f"worker = await ag.join('{place}', '{name}', options=ag.Options({options}))"
            )
        for program, host in zip(programs, hosts, strict=True):
            assert await program.do(EVERYBODY) == ["a", "b", "c"]
            told = await program.do("return worker.addresses")
            tcp = [each for each in told if each.startswith("tcp:")]
            assert [each.split(":")[1] for each in tcp] == [host.address]
        # All namespaces share the host's name and boot id, but no loopback.
        links = await programs[1].do("return [link.address for link in worker.agent.links.all()]")
        assert not any(each.startswith("unix:") for each in links)


async def test_a_host_name_that_means_loopback_does_not_make_rank_0_unreachable(options):
    async with network(2) as hosts:
        hosts[0].know("127.0.0.1 localhost\n127.0.1.1 node1\n")  # as Debian writes it
        hosts[1].know(f"127.0.0.1 localhost\n{hosts[0].address} node1\n")
        first, second, third = [await host.program() for host in (hosts[0], hosts[1], hosts[0])]
        await first.do(
            "worker = await ag.init_rpc('a', rank=0, rendezvous='node1:29500',"
            f" options=ag.Options({options}))"
        )
        for program, name in ((second, "b"), (third, "c")):
            await program.do(
                f"worker = await ag.join('node1:29500', '{name}', options=ag.Options({options}))"
            )
        for program in (first, second, third):
            assert await program.do(EVERYBODY) == ["a", "b", "c"]
            for told in await program.do("return worker.addresses"):
                assert not told.startswith(("tcp:127.", "tcp:0.0.0.0"))


async def test_a_name_that_dns_knows_after_five_seconds_is_waited_for(options):
    async with network(2) as hosts:
        first, second = [await host.program() for host in hosts]
        # Rank 0 does not know its own name either, as in a pod whose service is not ready.
        await first.do(
            "worker = await ag.init_rpc('a', rank=0, rendezvous='job-0.svc:29500',"
            f" options=ag.Options({options}))"
        )
        joining = second.start(f"""
            import logging
            lines = []
            class Keep(logging.Handler):
                def emit(self, record): lines.append(record.getMessage())
            logging.getLogger("aiograd.cluster").addHandler(Keep())
            worker = await ag.join('job-0.svc:29500', 'b', options=ag.Options({options}))
            return lines
        """)
        await asyncio.sleep(5.5)  # longer than the pause between two lines of the log
        assert not joining.done()
        hosts[1].know(f"{hosts[0].address} job-0.svc\n")
        lines = await asyncio.wait_for(joining, 10)
        assert any("waits for job-0.svc:29500" in line and "DNS" in line for line in lines)
        assert await second.do(EVERYBODY) == ["a", "b"]


async def test_a_name_that_dns_never_knows_is_an_error_that_names_it(options):
    async with network(1) as hosts:
        program = await hosts[0].program()
        with pytest.raises(AssertionError, match=r"RpcError: .*nowhere.*DNS"):
            await program.do(
                f"await ag.join('nowhere:29500', options=ag.Options({options}), patience=1)"
            )


async def test_a_file_on_a_shared_folder_brings_hosts_together(options, tmp_path):
    async with network(2) as hosts:
        first, second = [await host.program() for host in hosts]
        where = f"file:{tmp_path}/meet"
        options = "listen='10.78.0.0/24', grace=2.0"  # the secret is in the file
        await first.do(
            f"worker = await ag.init_rpc('a', rank=0, rendezvous='{where}',"
            f" options=ag.Options({options}))"
        )
        await second.do(f"worker = await ag.join('{where}', 'b', options=ag.Options({options}))")
        assert await second.do(EVERYBODY) == ["a", "b"]


async def test_a_firewall_that_lets_one_range_of_ports_pass_is_enough(options):
    async with network(3) as hosts:
        for host in hosts:
            _allow_only(host, "29500", "21000-21003")
        first, second, third = [await host.program() for host in hosts]
        ranged = f"{options}, ports=(21000, 21003)"
        place = f"{hosts[0].address}:29500"
        await first.do(
            f"worker = await ag.init_rpc('a', rank=0, rendezvous='{place}',"
            f" options=ag.Options({ranged}))"
        )
        for program, name in ((second, "b"), (third, "c")):
            await program.do(
                f"worker = await ag.join('{place}', '{name}', options=ag.Options({ranged}))"
            )
        for program in (first, second, third):
            assert await program.do(EVERYBODY) == ["a", "b", "c"]
        (told,) = await second.do("return [e for e in worker.addresses if e.startswith('tcp:')]")
        assert 21000 <= int(told.rpartition(":")[2]) <= 21003
        # And it is a firewall: a port outside of the range cannot be dialled.
        await third.do("task = await asyncio.start_server(print, '0.0.0.0', 22000)")
        with pytest.raises(AssertionError, match=r"PermissionError|OSError|TimeoutError"):
            await second.do(
                "async with asyncio.timeout(5):\n"
                f"    await asyncio.open_connection('{hosts[2].address}', 22000)"
            )


def _allow_only(host: Host, *ports: str) -> None:
    """Let TCP to and from these ports pass, and no other; skip where that cannot be had."""
    rules = [("dport", each, "lookup", "main") for each in ports]
    rules += [("sport", each, "lookup", "main") for each in ports]
    for i, rule in enumerate([*rules, ("prohibit",)]):
        made = ip("-n", host.namespace, "rule", "add", "pref", f"{i + 10}", "ipproto", "tcp", *rule)
        if not made:
            pytest.skip("a firewall takes a kernel with rules by port")


async def test_a_wrong_network_is_an_error_within_the_patience(options):
    async with network(2) as hosts:
        program = await hosts[1].program()
        hosts[0].plug("down")
        with pytest.raises(AssertionError) as caught:
            await program.do(
                f"await ag.join('{hosts[0].address}:29500', options=ag.Options({options}),"
                " patience=3)",
                within=15,
            )
        for word in ("RpcError", f"{hosts[0].address}:29500", os.uname().nodename, "rank 0"):
            assert word in str(caught.value)
        assert socket.gethostname() in str(caught.value)


# ── cuts and losses ─────────────────────────────────────────────────────────────────────────────


async def _cluster(hosts: list[Host], options: str, names: str) -> list[Program]:
    """Start an open cluster: the first worker on the first host, the others in turn."""
    programs = [await hosts[i % len(hosts)].program() for i in range(len(names))]
    place = f"{hosts[0].address}:29500"
    await programs[0].do(
        f"worker = await ag.init_rpc('{names[0]}', rank=0, rendezvous='{place}',"
        f" options=ag.Options({options}))"
    )
    for program, name in zip(programs[1:], names[1:], strict=True):
        await program.do(
            f"worker = await ag.join('{place}', '{name}', options=ag.Options({options}))"
        )
    return programs


async def _agree(programs: list[Program], names: list[str], within: float = 15.0) -> None:
    """Wait until these know each other, and follow one coordinator."""

    async def settled() -> bool:
        views = [await program.do(VIEW) for program in programs]
        return len({view[0] for view in views}) == 1 and all(view[1] == names for view in views)

    async with asyncio.timeout(within):
        while not await settled():
            await asyncio.sleep(0.1)


VIEW = "return worker.member.leader.name, sorted(each.name for each in ag.workers())"
LONG = float(os.environ.get("AIOGRAD_CUT", 0))  # seconds; `make hosts` cuts for 20


async def test_the_coordinator_is_cut_off_and_comes_back(options):
    # Short silences, so that a cut of a few seconds means what one of 20 s means by default.
    quick = options if LONG else f"{options}, heartbeat=0.3, silence=1.5, resume=1.0"
    seconds = LONG or 12.0  # the kernel's own time of 6 s does not change
    async with network(3) as hosts:
        # a and d are on the first host, b and e on the second, c on the third.
        first, *others = await _cluster(hosts, quick, "abcde")
        alone, cut_off = [others[0], others[1], others[3]], [others[2]]
        began = asyncio.get_running_loop().time()
        hosts[0].plug("down")
        # Two of five are cut off; the other three elect one of them.
        await _agree(alone, ["b", "c", "e"], within=16)
        # The lowest rank, unless another one noticed the loss much sooner.
        leader = (await alone[0].do(VIEW))[0]
        assert leader in "bce"
        assert await alone[0].do(EVERYBODY) == ["b", "c", "e"]
        await asyncio.sleep(max(0.0, began + seconds - asyncio.get_running_loop().time()))
        hosts[0].plug("up")
        # The old coordinator hears of its successor, and sends newcomers there.
        async with asyncio.timeout(15):
            while not await first.do("return worker.member.dismissed.done()"):
                await asyncio.sleep(0.1)
            for program in cut_off:
                while not await program.do("return worker.member.dismissed.done()"):
                    await asyncio.sleep(0.1)
        assert f"{leader} became the coordinator" in await first.do(
            "return worker.member.dismissed.result().why"
        )
        newcomer = await hosts[0].program()
        await newcomer.do(
            f"worker = await ag.join('{hosts[0].address}:29500', 'n', options=ag.Options({quick}))"
        )
        await _agree([*alone, newcomer], ["b", "c", "e", "n"])
        assert await newcomer.do(EVERYBODY) == ["b", "c", "e", "n"]


WORK = """
    import numpy as np

    def double(x): return x * 2
    async def slow(x):
        await asyncio.sleep(0.3)
        return x + 1
    async def call(to):
        return await ag.rpc_async(to, slow, args=(1,), timeout=30)
    async def step(to):
        async with ag.context() as ctx:
            x = ag.tensor([1.0, 2.0], requires_grad=True)
            y = await ag.rpc_async(to, double, args=(x,), timeout=30)
            await asyncio.sleep(0.3)
            z = await ag.rpc_async(to, double, args=(y,), timeout=30)
            await ctx.backward(z.sum())
            return ctx.gradients[x].numpy().tolist()
    others = [each.name for each in ag.workers() if each.name != worker.name]
    jobs = [(each, "call", call(each)) for each in others for _ in range(CALLS)]
    jobs += [(each, "pass", step(each)) for each in others for _ in range(PASSES)]
    found = await asyncio.gather(*[job for _, _, job in jobs], return_exceptions=True)
    return [
        [to, kind, type(each).__name__ if isinstance(each, Exception) else each]
        for (to, kind, _), each in zip(jobs, found)
    ]
"""


async def test_the_loss_of_the_coordinator_fails_only_what_touches_it(options):
    async with network(3) as hosts:
        first, *others = await _cluster(hosts, options, "abcdef")
        # 5 members with 5 peers each, 4 calls and now and then a pass: 100 calls and 10 passes, and
        # those to the coordinator.
        work = [
            WORK.replace("CALLS", "5").replace("PASSES", "1" if i % 2 == 0 else "0")
            for i in range(5)
        ]
        jobs = [program.start(code) for program, code in zip(others, work, strict=True)]
        await asyncio.sleep(0.15)  # in the middle of calls and passes, which take 0.3 s and more
        first.kill()
        began = asyncio.get_running_loop().time()
        found = [each for job in jobs for each in await asyncio.wait_for(job, 40)]
        untouched = [each for each in found if each[0] != "a"]
        calls = [value for _, kind, value in untouched if kind == "call"]
        passes = [value for _, kind, value in untouched if kind == "pass"]
        assert calls == [2] * 100
        assert passes == [[4.0, 4.0]] * 12
        for _, kind, value in (each for each in found if each[0] == "a"):
            expected = (
                ("WorkerLost", 2)
                if kind == "call"
                else (*("WorkerLost", "BackwardFailed", "UnknownContext"), [4.0, 4.0])
            )
            assert value in expected
        await _agree(others, list("bcdef"))
        assert asyncio.get_running_loop().time() - began < 10
        # Joins work again, at any member.
        newcomer = await hosts[1].program()
        told = await others[3].do("return [e for e in worker.addresses if e.startswith('tcp:')][0]")
        await newcomer.do(
            f"worker = await ag.join('{told.removeprefix('tcp:')}', 'n',"
            f" options=ag.Options({options}))"
        )
        await _agree([*others, newcomer], [*"bcdef", "n"])
