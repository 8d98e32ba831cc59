"""A cluster, looked at: the snapshot of `observe` for terminals, pages, notebooks and monitoring.

    guest       connect to a running cluster without being a member of it
    commands    `aiograd status`, `top`, `stuck`, `stacks`, `logs`, `record`, `doctor`, `dashboard`
    terminal    tables and lines for a terminal
    doctor      what this machine has, and what is missing
    numbers     the numbers of a snapshot as metrics with stable names
    scrape      snapshots for threads of exporters
    prometheus  a collector and an endpoint for Prometheus (an extra)
    otel        the same numbers for OpenTelemetry (an extra)
    page/       the page in a browser (an extra)
    notebook    the live view in a notebook (an extra)
    record      recordings of all workers for some seconds, as a trace or a page

Above `cluster`, which knows nothing of it. What needs another library is loaded when it is used.
"""
