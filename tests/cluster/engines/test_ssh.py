"""Clusters by ssh: with a command that looks like it, and with a real server of our own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

import aiograd as ag
from aiograd.cluster.engines.ssh import (
    LOGINS,
    Login,
    Room,
    explain_failure,
    parse_hosts,
    remote_command,
)
from aiograd.errors import RpcError, WorkerLost
from tests.support.hosts import network, possible
from tests.support.processes import alive, gone
from tests.support.ssh import fake_ssh, needs_sshd, sshd
from tests.support.waiting import until

pytestmark = pytest.mark.deadline(60)
loop = pytest.mark.asyncio(loop_factories=["asyncio"])
real = pytest.mark.skipif(bool(needs_sshd()), reason=needs_sshd())

ROOT = Path(__file__).parents[3]
# A login begins in the home folder, where the functions below cannot be imported.
PYTHON = ["env", f"PYTHONPATH={ROOT}", sys.executable]


def who() -> str:
    return ag.get_worker_info().name


@pytest.fixture
def ssh(tmp_path: Path) -> str:
    return fake_ssh(tmp_path)


# ── what to run ─────────────────────────────────────────────────────────────────────────────────


def test_hosts_are_read_with_the_number_of_workers_each_has_room_for():
    assert parse_hosts(["a", "me@b*4", "ssh://c:2222*02", "a*2"]) == [
        Room("a", 3),
        Room("me@b", 4),
        Room("ssh://c:2222", 2),
    ]


@pytest.mark.parametrize(
    "host", ["", " ", "a b", "a*", "a*0", "a*x", "a*-1", "a*1*2", "-oProxyCommand=true", "*3"]
)
def test_what_is_no_host_is_a_value_error(host):
    with pytest.raises(ValueError, match="is no host"):
        ag.cluster.SSHCluster([host])


@pytest.mark.parametrize("hosts", ["hostA", None, 3, [3], [b"a"]])
def test_hosts_are_a_list_of_texts(hosts):
    with pytest.raises(TypeError, match="host"):
        ag.cluster.SSHCluster(hosts)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"hosts": []}, ValueError),
        ({"n": -1}, ValueError),
        ({"n": 1.5}, TypeError),
        ({"python": ""}, ValueError),
        ({"python": []}, ValueError),
        ({"command": [""]}, ValueError),
        ({"ssh_options": "-p 22"}, TypeError),
        ({"options": {}}, TypeError),
        ({"patience": 0}, ValueError),
    ],
)
def test_arguments_that_make_no_sense_are_refused_before_anything_starts(settings, error):
    with pytest.raises(error):
        ag.cluster.SSHCluster(**{"hosts": ["a"], **settings})


def test_options_of_the_user_come_first_and_nobody_is_asked_for_a_password():
    login = Login(("ssh",), ("-o", "ConnectTimeout=3"), ("python3",))
    command = login.command(Room("me@a", 2), 0.5)
    assert command[:3] == ["ssh", "-o", "ConnectTimeout=3"]
    assert "BatchMode=yes" in command
    assert "ConnectTimeout=1" in command  # ssh takes whole seconds
    assert command[-3:-1] == ["--", "me@a"]


def test_the_far_command_has_only_what_all_shells_read_alike():
    line = remote_command(("~/my env/bin/python", "-X", "dev"), 4)
    assert line.startswith("exec sh -c ")
    assert "\n" not in line
    assert "!" not in line  # csh looks it up in its history
    assert set(re.findall(r"\\.", line)) == {r"\n"}
    *_, inner = shlex.split(line)
    words = """exec "$HOME"/'my env/bin/python' -X dev -c """
    assert inner.startswith(f"echo aiograd-login; {words}")


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "zsh", "tcsh", "fish"])
def test_the_shells_of_users_pass_the_far_command_on(shell):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} on this machine")
    line = remote_command(("env", "WORD=two words", sys.executable), 2)
    # Without a plan it ends: its standard input is empty.
    done = subprocess.run([shell, "-c", line], input="", capture_output=True, text=True)
    login, hello = done.stdout.splitlines()
    assert (login, done.stderr, done.returncode) == ("aiograd-login", "", 1)
    told = json.loads(hello.removeprefix("aiograd-worker "))
    assert told["aiograd"] == ag.__version__
    assert "error" not in told


@pytest.mark.parametrize(
    ("code", "said", "cure"),
    [
        (255, "me@a: Permission denied (publickey).", "ssh-copy-id a"),
        (255, "Host key verification failed.", "once by hand"),
        (255, "ssh: Could not resolve hostname a: Name or service not known", "HostName"),
        (255, "ssh: connect to host a port 22: Connection refused", "does its ssh server run"),
        (255, "ssh: connect to host a port 22: Connection timed out", "firewall"),
        (255, "kex_exchange_identification: read: reset by peer", "`ssh a true`"),
        (127, "sh: 1: exec: py: not found", 'python="/path/to/python"'),
        (1, "", "exit code 1"),
    ],
)
def test_every_failure_of_ssh_names_host_and_cure(code, said, cure):
    text = explain_failure("a", code, said, "py")
    assert cure in text
    assert re.search(r"\ba\b", text)
    assert said in text


# ── with a command that looks like ssh ──────────────────────────────────────────────────────────


async def test_gradients_flow_through_workers_on_hosts(ssh):
    async with ag.cluster.SSHCluster(
        ["near1", "me@near2*2"], python=PYTHON, command=ssh
    ) as cluster:
        assert [worker.name for worker in cluster] == ["worker0", "worker1", "worker2"]
        x = ag.tensor([1.0, 2.0], requires_grad=True)
        async with ag.context() as ctx:
            y = await cluster["worker0"].call(ag.tanh, x)
            z = await cluster["worker2"].call(ag.sin, y)
            await ctx.backward(z.sum())
            expected = np.cos(np.tanh(x.numpy())) * (1 - np.tanh(x.numpy()) ** 2)
            assert np.allclose(ctx.gradients[x].numpy(), expected)
        both = cluster.where(**{"ssh.host": "me@near2"})
        assert [worker.name for worker in both] == ["worker1", "worker2"]
        assert await cluster["worker1"].call(os.getpid) == cluster.pid("worker1")
        assert "by ssh" in repr(cluster)
        pids = [cluster.pid(worker.name) for worker in cluster]
    assert not any(alive(pid) for pid in pids)


def _papers() -> tuple[str, str, str]:
    parts = [Path(f"/proc/self/{name}").read_bytes() for name in ("cmdline", "environ")]
    return parts[0].hex(), parts[1].hex(), os.environ.get("OMP_NUM_THREADS", "")


@loop
async def test_the_secret_is_neither_in_a_command_line_nor_in_an_environment(
    ssh, tmp_path, monkeypatch
):
    secret = b"0123456789abcdef"
    monkeypatch.setenv("AIOGRAD_SECRET", secret.decode())  # ssh might send it along
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    options = ag.Options(secret=secret)
    async with ag.cluster.SSHCluster(
        ["near*99"], 1, python=PYTHON, command=ssh, options=options
    ) as cluster:
        assert bytes(cluster.driver.invitation().secret) == secret
        line, environment, threads = await cluster["worker0"].call(_papers)
        calls = (tmp_path / "calls").read_text()
        for form in (secret.decode(), secret.hex()):
            assert form.encode().hex() not in line + environment
            assert form not in calls
            assert form not in cluster.logs("worker0")
        assert threads == "1"  # the host's cores, divided among those it has room for


@loop
async def test_a_worker_alone_on_its_host_computes_on_all_cores(ssh, monkeypatch):
    cores = str(len(os.sched_getaffinity(0)))
    for set_by_user, used in ((None, cores), ("7", "7")):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if set_by_user is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", set_by_user)
        async with ag.cluster.SSHCluster(["near"], command=ssh) as cluster:
            assert await cluster["worker0"].call(os.getenv, "OMP_NUM_THREADS") == used


@loop
async def test_a_secret_file_of_the_driver_is_needed_on_no_other_host(ssh, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret").touch(mode=0o600)
    (tmp_path / "secret").write_text("0123456789abcdef")
    # The far end would not find a file that only this one names so.
    options = ag.Options(secret_file="secret")
    async with ag.cluster.SSHCluster(["near"], command=ssh, options=options) as cluster:
        assert bytes(cluster.driver.invitation().secret) == b"0123456789abcdef"
        assert len(cluster) == 1
    with pytest.raises(ValueError, match="one party"):
        ag.cluster.SSHCluster(["near"], options=ag.Options(secret_file={"a": "secret"}))


@loop
async def test_what_workers_print_is_shown_with_their_name_and_kept(ssh, capsys):
    async with ag.cluster.SSHCluster(["near"], python=PYTHON, command=ssh) as cluster:
        await cluster["worker0"].call(print, "from afar")
        await until(lambda: "from afar" in cluster.logs("worker0"))
    shown = capsys.readouterr().out
    assert "[worker0] from afar\n" in shown
    assert "aiograd-" not in shown


@loop
async def test_words_of_a_login_before_the_hello_do_no_harm(tmp_path, capsys):
    greet = "print('Welcome!', flush=True); print('no newline: ', end='', flush=True)"
    ssh = fake_ssh(tmp_path, greet)
    async with ag.cluster.SSHCluster(["near"], python=PYTHON, command=ssh) as cluster:
        assert await cluster["worker0"].call(who) == "worker0"
    assert "[worker0] Welcome!\n[worker0] no newline: \n" in capsys.readouterr().out


@loop
async def test_scale_restart_and_kill_hold_as_in_every_cluster(ssh):
    async with ag.cluster.SSHCluster(
        ["near1", "near2*2"], 2, python=PYTHON, command=ssh
    ) as cluster:
        await cluster.scale(3)
        assert await ag.Group(cluster.workers).call(who) == ["worker0", "worker1", "worker2"]
        with pytest.raises(RpcError, match=r"no room is left for worker3.*room for 3 workers"):
            await cluster.scale(4)
        assert len(cluster) == 3
        await cluster.scale(1)
        await cluster.scale(2)  # the room of those that ended is free again
        name = cluster.workers[1].name
        assert cluster[name].info.labels["ssh.host"] == "near2"
        pid = cluster.pid(name)
        call = cluster[name].call(time.sleep, 60)
        await cluster.kill(name)
        assert not alive(pid)
        with pytest.raises(WorkerLost):
            await call
        await cluster.restart(name)
        assert cluster[name].info.labels["ssh.host"] == "near2"
        assert await cluster[name].call(os.getpid) == cluster.pid(name) != pid


async def _block_the_loop() -> None:
    print("blocked", flush=True)  # noqa: T201
    time.sleep(600)  # noqa: ASYNC251


@loop
async def test_a_worker_whose_loop_is_blocked_can_be_killed(ssh):
    async with ag.cluster.SSHCluster(["near"], python=PYTHON, command=ssh) as cluster:
        call = cluster["worker0"].call(_block_the_loop)
        await until(lambda: "blocked" in cluster.logs("worker0"))
        pid = cluster.pid("worker0")
        await cluster.kill("worker0")
        assert not alive(pid)
        with pytest.raises(WorkerLost):
            await call


@loop
async def test_workers_of_a_driver_that_is_killed_end(ssh):
    program = f"""
        import asyncio
        import aiograd as ag
        async def main():
            async with ag.cluster.SSHCluster(["near*2"], command={ssh!r}) as cluster:
                print([cluster.pid(each.name) for each in cluster], flush=True)
                await asyncio.sleep(60)
        asyncio.run(main())
    """
    driver = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE
    )
    try:
        assert driver.stdout is not None
        pids = json.loads(await asyncio.to_thread(driver.stdout.readline))
        assert all(alive(pid) for pid in pids)
    finally:
        driver.kill()
        driver.communicate()
    async with asyncio.timeout(6):
        for pid in pids:
            await gone(pid)


@loop
async def test_few_logins_at_a_host_are_under_way_at_once(tmp_path):
    # A server drops some of more than ten that have not logged in yet.
    log = tmp_path / "log"
    logs = f"import time; log = open({str(log)!r}, 'a')\n"
    logs += "log.write('+'); log.flush(); time.sleep(0.3); log.write('-'); log.flush()"
    ssh = fake_ssh(tmp_path, logs)
    async with ag.cluster.SSHCluster(["near*9"], command=ssh) as cluster:
        assert len(cluster) == 9
    depth = list(itertools.accumulate(1 if each == "+" else -1 for each in log.read_text()))
    assert (max(depth), depth[-1]) == (LOGINS, 0)


# ── what does not fit ───────────────────────────────────────────────────────────────────────────


async def refused(text: str, hosts: tuple[str, ...] = ("near",), **settings) -> None:
    """Expect that a cluster does not start, for this reason."""
    begun = time.monotonic()
    with pytest.raises(RpcError, match=text):
        await ag.cluster.SSHCluster(hosts, **{"patience": 20, **settings})
    assert time.monotonic() - begun < 20


@loop
async def test_a_python_that_is_missing_is_an_error_that_names_the_host(ssh):
    await refused(
        r"near cannot run /no/such/python: .*python=", command=ssh, python="/no/such/python"
    )


@loop
async def test_aiograd_that_is_missing_is_an_error_that_says_how_to_install_it(ssh):
    python = [sys.executable, "-I", "-S"]
    text = r"near \(.*\) cannot import aiograd \(ModuleNotFoundError.*pip install aiograd=="
    await refused(text, command=ssh, python=python)


@loop
async def test_another_version_of_aiograd_is_an_error_that_names_both(ssh, tmp_path):
    (tmp_path / "aiograd.py").write_text("__version__ = '99.1'")
    python = ["env", f"PYTHONPATH={tmp_path}", sys.executable]
    text = rf"near \(.*\) has aiograd 99\.1, this cluster aiograd {ag.__version__}: .*python="
    await refused(text, command=ssh, python=python)


@loop
async def test_another_version_of_python_is_an_error_that_names_both(ssh, tmp_path):
    old = tmp_path / "old"
    told = '{"pid": 1, "python": "3.6.9", "executable": "/usr/bin/old", "error": "SyntaxError"}'
    old.write_text(f"#!/bin/sh\necho 'aiograd-worker {told}'\ncat\n")
    old.chmod(0o700)
    await refused(r"near \(/usr/bin/old\) has python 3\.6\.9", command=ssh, python=str(old))


@loop
async def test_an_ssh_that_is_missing_is_an_error_with_the_cure():
    await refused(r"cannot run /no/such/ssh: .*OpenSSH", command="/no/such/ssh")


@loop
async def test_a_silent_host_ends_the_start_when_the_patience_does(tmp_path):
    ssh = fake_ssh(tmp_path, "import time; print('hm', flush=True); time.sleep(60)")
    await refused(r"near did not start a worker within 1 s.*\nhm", command=ssh, patience=1)


@loop
async def test_one_host_that_fails_leaves_nothing_on_the_others(tmp_path):
    fail = "if name == 'near2':\n    print('Permission denied.', file=sys.stderr); sys.exit(255)"
    ssh = fake_ssh(
        tmp_path, f"open({str(tmp_path / 'pids')!r}, 'a').write(f'{{os.getpid()}} ')\n{fail}"
    )
    await refused(
        r"ssh cannot log in at near2: .*ssh-copy-id near2", ("near1*3", "near2"), command=ssh
    )
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        assert not alive(pid)


@loop
async def test_a_worker_that_fails_to_grow_the_cluster_leaves_it_as_it_was(tmp_path):
    flag = tmp_path / "down"
    ssh = fake_ssh(tmp_path, f"if os.path.exists({str(flag)!r}): sys.exit(255)")
    async with ag.cluster.SSHCluster(["near*3"], 1, python=PYTHON, command=ssh) as cluster:
        flag.touch()
        with pytest.raises(RpcError, match="ssh failed for near"):
            await cluster.scale(3)
        assert [worker.name for worker in cluster] == ["worker0"]
        flag.unlink()
        await cluster.scale(3)
        assert len(await ag.Group(cluster.workers).call(who)) == 3


@loop
async def test_a_start_that_is_cancelled_leaves_nothing(tmp_path):
    ssh = fake_ssh(tmp_path, f"open({str(tmp_path / 'pids')!r}, 'a').write(f'{{os.getpid()}} ')")
    starting = asyncio.ensure_future(_started(["near*2"], ssh))
    await until(lambda: (tmp_path / "pids").exists())
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        assert not alive(pid)


async def _started(hosts: list[str], ssh: str) -> ag.cluster.SSHCluster:
    return await ag.cluster.SSHCluster(hosts, command=ssh)


@loop
async def test_a_worker_that_cannot_reach_the_driver_says_from_where_and_where_to(ssh):
    # Without a Unix socket in common, and at an address that nobody can dial.
    options = ag.Options(transport="tcp", listen="127.0.0.1:0", advertise="192.0.2.1:9")
    settings = {"command": ssh, "options": options, "patience": 4}
    with pytest.raises(RpcError) as caught:
        await ag.cluster.SSHCluster(["far"], **settings)
    text = str(caught.value)
    assert text.startswith(
        "worker0 on far ended (exit code 1): it cannot dial the driver; let its firewall pass, or "
        "give Options(listen=..., advertise=..., ports=...); it said:\n"
    )
    assert "nobody answered at tcp:192.0.2.1:9" in text


@loop
async def test_the_driver_listens_beyond_this_host_if_it_is_told_to(ssh):
    # As for a container of this machine, whose ssh is at a port of localhost.
    options = ag.Options(listen="0.0.0.0:0", allow_plaintext=True)
    settings = {"command": ssh, "options": options}
    async with ag.cluster.SSHCluster(["near"], **settings) as cluster:
        assert any(each.startswith("tcp:") for each in cluster.driver.addresses)
    async with ag.cluster.SSHCluster(["near"], command=ssh) as cluster:
        assert all(each.startswith("unix:") for each in cluster.driver.addresses)


# ── with a real server ──────────────────────────────────────────────────────────────────────────


@real
@loop
async def test_a_cluster_over_a_real_ssh_works_and_leaves_nothing(tmp_path):
    with sshd(tmp_path) as options:
        async with ag.cluster.SSHCluster(
            ["127.0.0.1*5"], python=PYTHON, ssh_options=options
        ) as cluster:
            assert len(await ag.Group(cluster.workers).call(who)) == 5
            pids = [cluster.pid(each.name) for each in cluster]
            await cluster.kill("worker3")
            assert not alive(pids[3])
            await cluster.restart("worker3")
            await cluster.scale(2)
            await cluster["worker1"].call(print, "over a real one")
            await until(lambda: "over a real one" in cluster.logs("worker1"))
            pids = [cluster.pid(each.name) for each in cluster]
        for pid in pids:
            await gone(pid)


@real
@loop
async def test_a_server_that_ends_takes_its_workers_along(tmp_path):
    with sshd(tmp_path) as options:
        async with ag.cluster.SSHCluster(
            ["127.0.0.1"], python=PYTHON, ssh_options=options
        ) as cluster:
            pid = cluster.pid("worker0")
            (ssh,) = _children()
            os.kill(ssh, 9)  # as if the network were cut
            async with asyncio.timeout(6):
                await gone(pid)
            await until(lambda: cluster.state("worker0") == "dead")


def _children() -> list[int]:
    found = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return [
        int(each) for each in found if b"BatchMode" in Path(f"/proc/{each}/cmdline").read_bytes()
    ]


@real
@loop
async def test_a_wrong_key_is_an_error_with_the_cure(tmp_path):
    (tmp_path / "a").mkdir()
    with sshd(tmp_path / "a") as options:
        (tmp_path / "a" / "authorized").write_text("")
        await refused(
            r"ssh cannot log in at 127\.0\.0\.1: .*ssh-copy-id.*\n.*Permission denied",
            ("127.0.0.1",),
            ssh_options=options,
        )
        (tmp_path / "a" / "known").write_text("")
        await refused(
            r"ssh cannot log in at 127\.0\.0\.1: .*confirm its key",
            ("127.0.0.1",),
            ssh_options=options,
        )


@real
@loop
async def test_a_host_without_a_server_is_an_error_with_the_cure(tmp_path):
    with sshd(tmp_path) as options:
        pass
    text = r"ssh cannot log in at 127\.0\.0\.1: is it up"
    await refused(text, ("127.0.0.1",), ssh_options=options)


@real
@pytest.mark.skipif(not possible(), reason="making network namespaces takes root and `ip`")
@loop
async def test_workers_on_other_hosts_are_reached_by_ssh_and_then_directly_by_tls(tmp_path):
    async with network(3) as (near, *far):
        with contextlib.ExitStack() as stack:
            lines = []
            for host in far:
                folder = tmp_path / host.address
                folder.mkdir()
                words = stack.enter_context(sshd(folder, host.address, host.exec()))
                given = dict(zip(words[::2], words[1::2], strict=True))
                lines += [
                    f"Host alias-{host.address[-1]}\n  HostName {host.address}\n",
                    f"  Port {given['-p']}\n  IdentityFile {folder}/user\n",
                    f"  UserKnownHostsFile {folder}/known\n",
                ]
            (tmp_path / "config").write_text("".join(lines))
            driver = await near.program()
            hosts = [f"alias-{host.address[-1]}" for host in far]
            cluster = f"ag.cluster.SSHCluster({hosts}, ssh_options=['-F', '{tmp_path}/config'])"
            await driver.do(f"global cluster\ncluster = await {cluster}")
            # Each calls the other one: the driver is not between them.
            across = await driver.do("""
                async def ask(to):
                    return ag.get_worker_info().name, await ag.rpc_async(to, ag.get_worker_info)
                calls = [cluster["worker0"].call(ask, "worker1"),
                         cluster["worker1"].call(ask, "worker0")]
                return [(name, answer.name) for name, answer in await asyncio.gather(*calls)]
            """)
            assert across == [["worker0", "worker1"], ["worker1", "worker0"]]
            told = await driver.do("""
                members = cluster.driver.member.roster.members
                return [each for n in ("worker0", "worker1") for each in members[n].addresses]
            """)
            tcp = [each.split(":")[1] for each in told if each.startswith("tcp:")]
            assert tcp == [host.address for host in far]
            tls = await driver.do("""
                links = [link.connection.transport for link in cluster.driver.agent.links.all()]
                return [link.get_extra_info("ssl_object").version() for link in links]
            """)
            assert tls == ["TLSv1.3", "TLSv1.3"]
            await driver.do("await cluster.close()")


@real
@pytest.mark.skipif(not possible(), reason="making network namespaces takes root and `ip`")
@loop
async def test_a_host_that_is_cut_off_is_lost_and_does_not_keep_the_cluster_open(tmp_path):
    async with network(2) as (near, far):
        with sshd(tmp_path, far.address, far.exec()) as words:
            driver = await near.program()
            options = "ag.Options(heartbeat=0.2, silence=1.0, grace=1.0, resume=1.0)"
            given = f"ssh_options={words}, options={options}"
            await driver.do(f"""
                global cluster
                cluster = await ag.cluster.SSHCluster(["{far.address}"], {given})
            """)
            pid = await driver.do("import os\nreturn await cluster['worker0'].call(os.getpid)")
            far.plug("down")
            with pytest.raises(AssertionError, match=r"WorkerLost|WorkerUnresponsive"):
                await driver.do("import os\nawait cluster['worker0'].within(20).call(os.getpid)")
            begun = time.monotonic()
            await driver.do("await cluster.close()")
            assert time.monotonic() - begun < 1.0 + 1.0 + 1.0  # grace, a second, a busy machine
            await gone(pid)  # by itself: the cable is still cut
            far.plug("up")


@real
def test_the_program_of_the_page_runs_as_written(tmp_path):
    page = (ROOT / "docs" / "ssh.md").read_text()
    (program,) = re.findall(r"```python\n(import.*?)```", page, re.DOTALL)
    (tmp_path / "page.py").write_text(program)
    with sshd(tmp_path) as options:
        # As if both hosts were in the user's configuration.
        lines = ["HostName 127.0.0.1", f"Port {options[3]}", f"IdentityFile {tmp_path}/user"]
        lines.append(f"UserKnownHostsFile {tmp_path}/known")
        (tmp_path / "client").write_text("Host hostA hostB\n  " + "\n  ".join(lines) + "\n")
        ssh = tmp_path / "bin" / "ssh"
        ssh.parent.mkdir()
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {tmp_path}/client "$@"\n')
        ssh.chmod(0o700)
        done = subprocess.run(
            [sys.executable, str(tmp_path / "page.py")],
            env={**os.environ, "PATH": f"{ssh.parent}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.stdout == "3 (3, 2)\n", done.stderr
    assert done.returncode == 0
