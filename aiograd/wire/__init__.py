"""Bytes on the wire, sans-IO: nothing here opens a socket, starts a task or reads a clock.

    messages     kinds of messages and the flags on them
    framing      frames: header, small bodies, large messages in chunks
    handshake    how two workers authenticate each other
    session      a stream of bytes that outlives its connections
    records      a tag and a counter on each record of a plain connection
    openssl      AES-GCM of Python's own OpenSSL
    secrets      secrets that no text shows, and which peer shares which
    names        the rule for names of workers
    codec        any Python value: pickle, borrowed buffers, travellers
    fastcodec    the fast path: numbers, strings and arrays, without looking inside containers
    safecodec    plain data only, for peers that must not run code here
    namespaces   the globals of functions that are sent by value
    reducers     what cloudpickle cannot send by value: slots, cached functions and properties
    arrays       how an ndarray is pickled
    buffers      memory for large messages: a buffer pool, an allocator of blocks
    diagnose     finds the part of a value that cannot be pickled

    handshake ─▶ session ─▶ framing ─▶ messages, buffers;  handshake ─▶ records ─▶ openssl
    safecodec ─▶ codec ─▶ fastcodec, arrays, diagnose, namespaces, reducers

The package imports `errors`, numpy and cloudpickle, nothing else of the library; `rpc` imports it.
"""
