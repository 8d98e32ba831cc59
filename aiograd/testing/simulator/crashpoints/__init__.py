"""Crash points: small programs, with one fault at every boundary of every one of them.

    make crashpoints                                       all cases of 225 programs
    make crashpoints ALL=1                                 and of 60 larger ones
    make crashpoints SAMPLE=5000 SEED=7                    about so many, drawn from the seed
    make crashpoints CASE=chain3/once:57:c:kill TRACE=1    one of them, with all of its events

A boundary is the moment before a callback of a worker, or before a worker writes to a connection.
At one boundary, one worker suffers one fault:

- kill: its process ends; what it wrote before still arrives
- replace: it is killed, and at once started again under its name
- resume: its connections are reset, and come back half a second later
- cut: no byte reaches it or leaves it any more

The simulator is that of random seeds, and the same invariants are checked. Random seeds find what
long programs do under many faults; crash points leave no moment of a short one untried.

    programs   what is computed where, and the gradients it should give
    trial      one run of a program: it starts the passes, and judges what every worker shows
    cases      the faults of a run, all cases of a program, and samples of them

A module imports only modules above it.
"""
