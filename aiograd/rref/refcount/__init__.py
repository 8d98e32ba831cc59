"""The reference-count protocol, sans I/O: messages in, records and notifications out.

    records   `OwnerRecord`, `UserRecord`, ids and their formats, call sites
    owner     the owner's table: values, and the forks that keep them alive
    user      the user's table: forks of values elsewhere, and the outbox of notifications
    audit     forks that were sent and not heard of since
    protocol  one worker's part of the protocol: joins the three, survives losses of sessions
    access    checks of what a restricted peer may do

Each module imports only those above it. Time, tasks and messages belong to `rref.services`.
"""
