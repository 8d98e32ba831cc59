"""Remote values: create one on a worker, use it from any other, and release it."""

import asyncio

import numpy as np

import aiograd as ag


class Archive:
    """Too large to send around: it stays on one worker, and others call its methods."""

    def __init__(self, rows):
        self.table = np.random.default_rng(0).standard_normal((rows, 1000))
        self.questions = 0

    def mean_of(self, row):
        self.questions += 1
        return float(self.table[row].mean())

    def size(self):
        return f"{self.table.nbytes / 1e6:.0f} MB, asked {self.questions} times"


async def ask_from_afar(archive, rows):
    """Runs on a third worker: the reference was sent there, the 40 MB were not."""
    me = ag.get_worker_info().name
    print(f"{me}: the archive is with {archive.owner_name()}, am I its owner? {archive.is_owner()}")
    return await asyncio.gather(*[archive.rpc_async().mean_of(row) for row in rows])


def largest(archive):
    """Runs at the owner, where the reference gives access to the object itself."""
    return float(archive.local_value().table.max())


async def main():
    async with ag.LocalCluster(2) as cluster:
        archive = ag.remote("worker0", Archive, args=(5000,))  # returns at once
        print(repr(archive))
        print("A method, at the owner:", await archive.rpc_async().size())
        print(
            "From a third worker:", await cluster["worker1"].call(ask_from_afar, archive, range(3))
        )
        print("A function, at the owner:", await cluster["worker0"].call(largest, archive))
        print("Afterwards:", await archive.rpc_async().size())

        row = archive.remote().mean_of(7)  # the result of a method can stay there, too
        print(f"\n{row.owner().name} keeps the result; a copy of it: {await row:.4f}")
        try:
            archive.local_value()
        except ag.errors.NotOwner as error:
            print("Only the owner has the object:", error)

        held = (await cluster["worker0"].call(ag.debug_info))["owner_rrefs"]
        await row.release()
        async with archive:  # leaving the block releases the reference
            pass
        left = (await cluster["worker0"].call(ag.debug_info))["owner_rrefs"]
        print(f"\nworker0 kept {held} values for others, and after the release {left}")

        broken = ag.remote("worker1", Archive, args=("many",))
        try:
            await broken
        except TypeError as error:
            print("An error of the making appears at every use:", error)


if __name__ == "__main__":
    asyncio.run(main())
