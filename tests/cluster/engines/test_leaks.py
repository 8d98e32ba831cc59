"""The leak check in tests of engines: what is the engine's own is left out, what is ours is not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

from aiograd.cluster.joining.folders import PrivateFolder
from tests.support.engines import left_in, own_children, own_files, own_threads, temporary_folder


def test_threads_of_engines_are_left_out_and_no_others():
    engines = ["IO loop", "Profile", "Dask-Offload_0", "ray_listen_error_messages"]
    ours = ["aiograd-copy_0", "aiograd-lifeline", "Thread-1 (work)", "asyncio_0", "dns-a"]
    assert own_threads([*engines, *ours]) == ours
    assert own_threads([threading.current_thread().name]) == ["MainThread"]


def test_a_socket_of_ours_is_found_at_both_ends_and_one_of_an_engine_is_not():
    folder = PrivateFolder()
    try:
        with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
            listener.bind(f"{folder.path}/w")
            listener.listen()
            client.connect(f"{folder.path}/w")
            accepted, _ = listener.accept()
            with accepted, socket.socket() as engines:
                engines.bind(("127.0.0.1", 0))
                mine = [str(each.fileno()) for each in (listener, client, accepted)]
                read, write = os.pipe()
                names = dict.fromkeys([*mine, str(engines.fileno()), str(read)], "socket:[1]")
                assert len(own_files(names)) == 3
                os.close(read)
                os.close(write)
                assert len(own_files({"0": f"{folder.path}/lock"})) == 1
    finally:
        folder.close()


def test_a_worker_of_ours_is_no_process_of_an_engine():
    wait = "import sys; print(flush=True); sys.stdin.read()  # "
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        subprocess.Popen([sys.executable, "-c", wait + "aiograd"], **pipes) as worker,
        subprocess.Popen(
            [sys.executable, "-c", wait + "from multiprocessing.spawn import spawn_main"], **pipes
        ) as nanny,
    ):
        for process in (worker, nanny):
            assert process.stdout is not None
            process.stdout.readline()  # its command line can be read from now on
        assert own_children([str(worker.pid), str(nanny.pid)]) == [str(worker.pid)]
        for process in (worker, nanny):
            process.communicate(timeout=10)


def test_folders_of_live_workers_are_found_and_those_of_dead_ones_removed():
    program = (
        "import sys\n"
        "from aiograd.cluster.joining.folders import PrivateFolder\n"
        "folder = PrivateFolder()\n"
        "print(flush=True)\n"
        "sys.stdin.read()\n"
    )
    with temporary_folder() as folder:
        command = [sys.executable, "-c", program]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, **pipes) as worker:
            assert worker.stdout is not None
            worker.stdout.readline()
            assert len(left_in(folder)) == 1
            worker.kill()
        assert left_in(folder) == []
