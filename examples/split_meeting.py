"""Start the parties of 05_split_learning.py: secrets, processes, a log of what each sends."""

import asyncio
import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

import aiograd as ag

# Which secret each party shares with whom. Clinic and lab share none.
KEYS = {
    "registry": {"clinic": "clinic.key", "lab": "lab.key"},
    "clinic": {"registry": "clinic.key"},
    "lab": {"registry": "lab.key"},
}


def meeting(folder, name, path="", *, key=None):
    """The rendezvous, and the secrets to prove. `key`: another one than was agreed on."""
    keys = {peer: f"{folder}/{key or file}" for peer, file in KEYS[name].items()}
    options = ag.Options(mode="restricted", secret_file=keys, timeout=10)
    return {"rendezvous": f"unix:{path or f'{folder}/meet'}", "options": options}


def run_parties(main, party, argv):
    """Run `main` here and each party in a process of its own, which starts this script again."""
    if len(argv) > 1:
        asyncio.run(party(argv[1], int(argv[2]), argv[3]))
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in ("clinic", "lab", "guess"):  # partners would hand it over in person
            path = pathlib.Path(folder, f"{name}.key")
            path.touch(mode=0o600)
            path.write_text(os.urandom(32).hex())
        parties = [
            subprocess.Popen([sys.executable, argv[0], name, str(rank), folder])
            for rank, name in ((1, "clinic"), (2, "lab"))
        ]
        try:
            asyncio.run(main(folder))
        finally:
            codes = [each.wait() for each in parties]
        if any(codes):
            sys.exit("a party failed")


class WireLog:
    """All bytes that a party sends: it joins through this proxy, so its connection passes here."""

    def __init__(self, folder, name):
        self.path, self.sent = f"{folder}/{name}", bytearray()
        self._target, self._tasks = f"{folder}/meet", set()

    async def __aenter__(self):
        self._server = await asyncio.start_unix_server(self._accept, self.path)
        return self

    async def __aexit__(self, *exc):
        self._server.close()
        await asyncio.gather(*self._tasks)

    def _accept(self, reader, writer):
        task = asyncio.create_task(self._carry(reader, writer))
        self._tasks.add(task)

    async def _carry(self, reader, writer):
        while self._server.is_serving():
            try:
                back, onwards = await asyncio.open_unix_connection(self._target)
            except OSError:  # the registry may not be there yet
                await asyncio.sleep(0.01)
                continue
            await asyncio.gather(
                self._copy(reader, onwards, self.sent), self._copy(back, writer, bytearray())
            )
            return
        writer.close()

    async def _copy(self, reader, writer, log):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                log += data
                writer.write(data)
                await writer.drain()
        writer.close()

    def found(self, array):
        """How many numbers of an array are among the bytes, wherever they begin."""
        numbers, seen = array.astype("<f8").view("<u8"), set()
        ends = np.zeros(1 << 20, bool)  # most words do not even end like one of them
        ends[numbers & 0xFFFFF] = True
        for start in range(8):
            words = np.frombuffer(self.sent, "<u8", (len(self.sent) - start) // 8, start)
            words = words[ends[words & 0xFFFFF]]
            seen |= set(words[np.isin(words, numbers)].tolist())
        return f"{len(seen):,} of {array.size:,}"


def told(wire, party):
    """What the log says. The embeddings show that it would find the columns, had they left."""
    peers, last = ", ".join({peer for peer, _ in party.log}), party.log[-1][1]
    return (
        f"{len(wire.sent) / 1e6:.1f} MB went out, with {len(party.log)} arrays of "
        f"{last.shape[1]} numbers per row for {peers}\n    among these bytes are "
        f"{wire.found(last)} numbers of its last embeddings and "
        f"{wire.found(party.columns)} of its columns"
    )


async def refused(attempt, what):
    """Try something that is not allowed, and print the error."""
    try:
        await attempt
    except ag.errors.SecurityError as error:
        say(f"{what}: {type(error).__name__}: {error}")


def say(text):
    """Print in one piece: three processes speak at once."""
    print(f"{text}\n", end="", flush=True)
