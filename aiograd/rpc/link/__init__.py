"""One peer: the session with it, and everything that is sent and received.

    link              one session with one peer; its states as a table; sending
    links             all links of a worker: finding, heartbeat, lost peers
    send              the outbox: lanes, batches, chunks
    receive           frames to the part that they concern
    inbox             the order in which messages take effect, each once (pure)
    connection        one connection: bytes to frames
    listener          accept connections, limit unauthenticated ones
    dialer            connect, resume, back off
    handshaking       the asyncio protocol of a handshake, which listener and dialer share
    inbound_budget    memory for messages that came in
    transfer_watch    the least rate of a partner's large messages (pure)
    ledger            what each partner occupies, by its name
    shared_memory     arrays between processes of one host, without a socket

Each module uses those behind it:

    links ─▶ link ─▶ receive, connection ─▶ send, inbox
    listener, dialer ─▶ handshaking
"""
