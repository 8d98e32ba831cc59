"""Bytes to and from the operating system, as asyncio transports and protocols.

    network      addresses (`unix:`, `tcp:`, `memory:`) to listeners and connections
    interfaces   the addresses of this host; what a worker tells others to dial
    inproc       `memory:` addresses: transports that hand bytes to each other within one loop
    tls          credentials; listening and connecting with TLS 1.3
    tls_stream   encryption between a TCP transport and the protocol above it
    ephemeral    a certificate for TLS by the secret alone
    sealed_stream  a tag and a counter on every record of a plain connection

`network` uses the others, `tls` uses `tls_stream` and `ephemeral`. Nothing here knows messages,
links or agents: imports are `errors`, `wire.records` and the modules of this package. The rest of
the library gets its connections from the `Network` of `runtime.Runtime`, so that the simulator can
bring its own.
"""
