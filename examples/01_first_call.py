"""A first call: run functions on other workers, many at once, and handle their errors."""

import asyncio
import os
import time

import aiograd as ag


def where_am_i(greeting):
    """An ordinary function: it runs in a thread of the worker that is called."""
    return f"{greeting} from {ag.get_worker_info().name}, process {os.getpid()}"


async def count_down(seconds):
    """A coroutine runs on the worker's event loop, so a thousand can wait there at once."""
    await asyncio.sleep(seconds)
    return f"{ag.get_worker_info().name} waited {seconds} s"


async def ask_the_neighbour():
    """A worker may call others; a nested call inherits the deadline."""
    return await ag.rpc_async("worker1", where_am_i, args=("hello by way of worker0",))


def divide(a, b):
    return a / b


async def main():
    async with ag.LocalCluster(2) as cluster:
        print(f"I am {ag.get_worker_info().name}, process {os.getpid()}; members:", ag.workers())

        print("\nOne call:", await ag.rpc_async("worker0", where_am_i, args=("hello",)))
        print("The short form:", await cluster["worker1"].call(where_am_i, "hello"))
        print("A lambda, too:", await cluster["worker1"].call(lambda x: x**2, 12))
        print("Through a neighbour:", await cluster["worker0"].call(ask_the_neighbour))

        start = time.perf_counter()
        await asyncio.gather(
            *[worker.call(count_down, 0.2) for worker in cluster for _ in range(500)]
        )
        print(f"\n1000 calls of 0.2 s, all at once: {time.perf_counter() - start:.2f} s")

        try:
            await cluster["worker1"].call(divide, 1, 0)
        except ZeroDivisionError as error:
            print(f"\nAn error arrives as itself: ZeroDivisionError: {error}")
            print("  " + error.__notes__[0].splitlines()[0])
        try:
            await ag.rpc_async("worker0", count_down, args=(60,), timeout=0.3)
        except ag.errors.DeadlineExceeded as error:
            print("Patience is a number:", error)
        try:
            await ag.rpc_async("worker7", where_am_i, args=("hello",))
        except ag.errors.UnknownWorker as error:
            print("A typing error is found at once:", error)


if __name__ == "__main__":
    asyncio.run(main())
