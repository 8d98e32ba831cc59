"""The chains and fan-outs of the dist mode with no library at all: processes, shared memory, pipes and numpy.

BENCH_PRODUCTS=torch: with torch's products of matrices, which take another time than numpy's.

The same matrices cross the same number of times, and nothing is said about them but one byte. What a library takes beside
that is its own; what this takes beside `local.dist_arithmetic` is the machine's: wake-ups, and caches that another process used.
And arrays that a process sends back over TCP as they came, with blocking sockets and memory that is there already.
"""
import mmap, os, signal, socket
from common import *
import numpy as np

product = np.matmul
if os.environ.get("BENCH_PRODUCTS") == "torch":
    import torch
    torch.set_num_threads(1)

    def product(a, b):
        return torch.mm(torch.from_numpy(a), torch.from_numpy(b)).numpy()

N = 256
SIZE = N * N * 4
INPUT, GRADIENT, OUTPUT, BACK = range(4)  # what lies in a worker's four places


def worker(index, last, pipes, place):
    """Forward `f`, result on its way back `r`; gradient of the result `g`, of the input `b`; of a fan-out `h`."""
    w = np.random.default_rng(index).standard_normal((N, N), dtype=np.float32)
    up = pipes[index - 1] if index else pipes[-1]
    while True:
        word = os.read(pipes[index][0], 1)
        if word == b"f":
            x = place(index, INPUT)
            y = product(x, w)
            if index < last:
                place(index + 1, INPUT)[:] = y
                os.write(pipes[index + 1][1], b"f")
            else:
                place(index, OUTPUT)[:] = y
                os.write(up[1], b"r")
        elif word == b"r":
            place(index, OUTPUT)[:] = place(index + 1, OUTPUT)
            os.write(up[1], b"r")
        elif word == b"g" and index < last:
            place(index + 1, GRADIENT)[:] = place(index, GRADIENT)
            os.write(pipes[index + 1][1], b"g")
        elif word in (b"g", b"b"):
            g = place(index, GRADIENT) if word == b"g" else place(index + 1, BACK)
            kept = product(x.T, g)
            place(index, BACK)[:] = product(g, w.T)
            os.write(up[1], b"b")
        elif word == b"s":
            x = place(index, INPUT)
            total = product(x, w).sum()
            os.write(pipes[-1][1], b"r")
        elif word == b"h":
            g = np.ones((N, N), np.float32)
            kept = product(x.T, g)
            place(index, BACK)[:] = product(g, w.T)
            os.write(pipes[-1][1], b"b")


class Processes:
    """Workers that share memory with this process, each at the end of a pipe; ours is the last."""

    def __init__(self, count, chained):
        memory = mmap.mmap(-1, SIZE * 4 * count)
        self.pipes = [os.pipe() for _ in range(count + 1)]
        self.pids = []

        def place(index, what):
            return np.frombuffer(memory, np.float32, N * N, (4 * index + what) * SIZE).reshape(N, N)

        self.place = place
        for index in range(count):
            pid = os.fork()
            if pid == 0:
                try:
                    worker(index, count - 1 if chained else index, self.pipes, place)
                finally:
                    os._exit(0)
            self.pids.append(pid)

    def tell(self, index, word):
        os.write(self.pipes[index][1], word)

    def hear(self, count):
        while count:
            count -= len(os.read(self.pipes[-1][0], count))

    def close(self):
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for pipe in self.pipes:
            os.close(pipe[0]), os.close(pipe[1])


def chain(processes, x):
    processes.place(0, INPUT)[:] = x
    processes.tell(0, b"f")
    processes.hear(1)
    total = processes.place(0, OUTPUT).sum()
    processes.place(0, GRADIENT)[:] = 1
    processes.tell(0, b"g")
    processes.hear(1)
    return processes.place(0, BACK).copy()


def fan(processes, x):
    count = len(processes.pids)
    for index in range(count):
        processes.place(index, INPUT)[:] = x
        processes.tell(index, b"s")
    processes.hear(count)
    for index in range(count):
        processes.tell(index, b"h")
    processes.hear(count)
    gradient = processes.place(0, BACK).copy()
    for index in range(1, count):
        gradient += processes.place(index, BACK)
    return gradient


def receive(sock, view):
    at = 0
    while at < len(view):
        at += sock.recv_into(view[at:])


def echo_over_tcp(label, n):
    listener = socket.create_server(("127.0.0.1", 0))
    pid = os.fork()
    view = memoryview(bytearray(n))
    if pid == 0:
        try:
            sock, _ = listener.accept()
            while True:
                receive(sock, view)
                sock.sendall(view)
        finally:
            os._exit(0)
    sock = socket.create_connection(listener.getsockname())
    listener.close()
    array = memoryview(bytearray(n))

    def one():
        sock.sendall(array)
        receive(sock, view)

    emit_tensor("tcp_echo", label, n, time_loop_sync(one, tensor_seconds(n), warm=2, min_n=4))
    sock.close()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


for label, n in SIZES:
    if want(f"tensor.tcp_echo.{label}.ms"):
        echo_over_tcp(label, n)
X = np.random.default_rng(99).standard_normal((N, N), dtype=np.float32)
for name, run in (("chain", chain), ("fanout", fan)):
    for n in (2, 4, 8):
        if want(f"dist.{name}{n}"):
            processes = Processes(n, chained=run is chain)
            emit_latency(f"dist.{name}{n}", time_loop_sync(lambda: run(processes, X), warm=20))
            processes.close()
