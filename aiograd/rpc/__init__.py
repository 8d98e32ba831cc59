"""Workers that call each other. Knows neither tensors nor references.

    api                  the public functions: rpc_async, rpc_sync, rpc_stream, run_sync, Group
    balance              `Group.map`: the next item to the member that is free
    progress             bars of called functions, shown at the caller; as_completed
    agent                one worker: puts the parts together; call, request, post, stream
    options              every setting, with its reason
    directory            the members: names, ranks, incarnations, addresses
    future               the answer to a call, and what is known about the call (`CallInfo`)
    scope                the current agent, and the scope of the running call (`CallScope`)
    affinity             in which process, thread and loop a worker may be used
    extension            what other layers plug in: Traveller, Baggage, ResultStore, FaultInjector
    envelope             the body of a message: token, baggage, metadata, payload
    channel              what caller and callee know of their link and their worker
    retry                RetryPolicy and the one driver of retries
    notify               notifications: coalesced, and sent until they are acknowledged
    remote_exceptions    exceptions on the wire, as themselves
    plain_exceptions     exceptions between partners: a name and a text, never code
    caller/              calls this worker makes to one peer
    callee/              calls one peer makes here
    link/                one peer: connecting, sending, receiving, losing it
    transport/           bytes to and from the operating system
    runtime/             the injected world: clock, randomness, threads, deadlines
    observe/             what is going on: recordings, metrics, the watchdog

Imports go downwards, type-only imports included (`tests/test_layers.py`):

    api, balance, notify, progress ─▶ agent ─▶ link ─▶ caller, callee ─▶ channel
                                   ─▶ observe, options, retry ─▶ envelope, future, scope ─▶ the rest

Four modules stand lower than their folders, because they know no link and no callee: at the bottom
`link.send` (the outbox), `callee.functions` and `callee.exposure`, beside `observe`
`link.inbound_budget`. Parts get a `Channel` and a `Host`, small protocols, instead of the agent.
"""
