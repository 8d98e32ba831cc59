"""Calls that this worker makes to one peer.

    calls      start, track and end calls; the fast path for small arguments
    window     calls beyond `max_inflight`, and nested calls that must not wait for them (pure)
    replies    results, items of streams, exceptions
    streams    the reader's end of a stream

`replies` uses `calls`, `calls` uses `window`. What a peer calls here is `callee`'s.
"""
