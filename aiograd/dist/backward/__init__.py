"""How a backward pass runs: one-way messages, answered exactly once, and credit that comes home.

    credit    shares of the originator's 1, by which it knows the end of a pass   (pure)
    loops     tensors that came from a peer and went back to it as they were      (pure)
    plan      what a pass will visit on one worker, and how long that could take  (pure)
    state     one worker's part of one pass, as a state machine                   (pure)
    codec     the answers of a gradient message as they travel                    (pure)
    outcomes  how the passes of a context ended, as far as one worker knows       (pure)
    active    the passes under way on a worker
    abort     how a pass that cannot be finished ends everywhere
    reports   how participants learn the outcomes
    engine    carries the messages of passes between workers

The pure modules decide and never do I/O; each imports only modules above it. `active`, `abort`,
`reports` and `engine` carry out what they decide, with `dist.context` and `dist.channel`.
"""
