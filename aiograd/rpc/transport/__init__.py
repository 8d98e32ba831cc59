"""Bytes to and from the operating system, as asyncio transports and protocols.

    network      addresses (`unix:`, `tcp:`, `memory:`) to listeners and connections
    inproc       `memory:` addresses: transports that hand bytes to each other within one loop
    tls          certificates; listening and connecting with TLS 1.3
    tls_stream   encryption between a TCP transport and the protocol above it
    sealed_stream  a tag and a counter on every record of a plain connection

`network` uses the others, `tls` uses `tls_stream`. Nothing here knows messages, links or agents:
imports are `errors` and the modules of this package. The rest of the library gets its connections
from the `Network` of `runtime.Runtime`, so that the simulator can bring its own.
"""
