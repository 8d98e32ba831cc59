"""Programs for random seeds: what they do is drawn, and the outcome of each step is known.

    actor        a task of user code on one node: it makes calls, and the ledger judges them
    calls        what actors do with calls and streams, and the functions that they call
    references   the same with references
    gradients    the same with contexts and backward passes

An act is a coroutine function of one actor; `run.ACTS` says which acts a plan may draw from.
Functions are called by name on other nodes, so the names of these modules travel in messages.
`calls`, `references` and `gradients` import `actor`; `references` also imports `calls`.
"""
