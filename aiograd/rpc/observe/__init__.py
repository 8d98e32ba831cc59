"""What a worker is doing, for people and for tests.

    profile     recordings: spans, `profile()`, tables and Chrome traces
    tracing     how recorded calls and passes cross the wire
    otel        recordings as OpenTelemetry spans (an extra)
    metrics     counters of limits that were reached, and the lag of the event loop
    log_rate    a bound on log lines that others cause
    watchdog    a thread that logs what blocks the event loop

`tracing` and `otel` use `profile`. Each module says in a small protocol what it needs of a worker;
none of them imports agents, links, callers or callees.
"""
