"""What a worker is doing, for people and for tests.

    profile     recordings: spans, `profile()`, tables and Chrome traces
    tracing     how recorded calls and passes cross the wire
    otel        recordings as OpenTelemetry spans (an extra)
    metrics     the numbers of a worker: counters, bytes, limits, the lag of the event loop
    tally       calls and passes by outcome and duration, while somebody collects them
    host        memory, processor time and state of a process, as the system knows them
    log_rate    a bound on log lines that others cause
    watchdog    a thread that logs what blocks the event loop

`tracing` uses `profile` and `tally`, `otel` uses `profile`. Each module says in a small protocol
what it needs of a worker; none of them imports agents, links, callers or callees.
"""
