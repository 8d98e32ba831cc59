"""What a worker takes from the world outside, injected so that the simulator can replace it.

    runtime        clock, randomness, threads and network of one worker
    threads        the thread pool for plain functions
    thread_shares  the parts of it that partners may use
    deadlines      one loop timer for all deadlines of a worker
    polling        busy-polling for a moment after traffic

`runtime` makes the thread pool and holds the `transport.network`; `polling` asks both. None of them
knows messages, links or agents.
"""
