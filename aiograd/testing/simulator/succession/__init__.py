"""Succession: a cluster that loses its coordinator again and again, with the cluster layer's code.

    make succession SEED=0 COUNT=2000            seeds
    make succession POINTS=1                     a crash at every boundary of an election
    make succession BUG=all COUNT=300            planted bugs

In each round of a seed members crash, are stopped or are cut off, the coordinator above all. Then
everything heals, and the cluster has to be whole again. What must hold, whatever happens:

S1  no two workers lead in one term
S2  two members that have the same version of the roster have the same roster
S3  a member's version never goes back
S4  the smaller side of a partition elects nobody
S5  within 10 s of the last fault, those that are left agree on one coordinator and one roster,
    which has all of them; nobody else leads, also not one that led before and came back
S6  no member is lost that lives and that a majority can reach
S7  then a newcomer joins at any member, dead ones come back under their names, all members meet at
    a barrier, and all of them elect

    cluster   members in the simulated world; S1 to S3, at every change
    plan      what a seed means: rounds of faults
    run       one seed: its rounds, and S4 to S7
    points    a fault at every boundary of one election
    bugs      bugs that the simulator has to find

A module imports only modules above it.
"""
