"""Worker processes on this host: how they start, what they run, and how they end.

    spawn         child processes by exec; their output; `SpawnedWorker`
    forkserver    a process that loads the library once and forks workers; `ForkedWorker`
    worker_main   what a worker process runs: plan from standard input, join, serve, exit
    malloc        keep the memory of freed arrays, collect garbage less often

`cluster/local.py` and `cluster/launch.py` use them. `forkserver` imports `spawn` and `worker_main`;
`spawn` knows no worker code. `malloc` imports nothing; `cluster/joining/bootstrap.py` uses it, too.
"""
