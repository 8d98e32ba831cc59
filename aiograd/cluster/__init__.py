"""Clusters: starting, joining, leaving and stopping workers.

    api           functions for a program that is one worker: init_rpc, shutdown, barrier …
    worker        `Worker`, the composition root: plugs agent, membership and layers together
    local         `LocalCluster` and `Handle`: workers on this machine, driven by this process
    launch        the commands `aiograd run` and `aiograd worker`
    config        arguments and the launcher's environment become a `WorkerPlan`
    invitation    `Invitation`: what another process needs to join; versions that have to fit
    rendezvous    rendezvous addresses, the rendezvous file, secret files
    folders       private folders for Unix sockets; removes those of killed processes
    listening     where a worker listens and what it tells others
    bootstrap     sockets, dialling the coordinator, finding the secret
    membership    who is a member: decisions and copies, without I/O
    member        every worker's end of the membership services
    coordinator   the coordinator's end of the membership services
    collectives   barriers and gathers
    logs          the output of workers, for those who look at their cluster
    termination   when no call is under way anywhere, without I/O
    processes/    worker processes: spawn, forkserver, worker_main, malloc

Imports go downwards: api, local, launch ─▶ worker ─▶ coordinator ─▶ member ─▶ collectives,
membership; worker ─▶ bootstrap ─▶ config, listening ─▶ invitation ─▶ rendezvous. Of the layers
below, only `worker` knows `rref`, `dist` and `autograd`; the others use `rpc` and `wire` alone. Log
lines go to the logger "aiograd.cluster".
"""

# Public under this name: `Options(tls=aiograd.cluster.TLS(cert, key, ca))`.
from aiograd.rpc.transport.tls import TLS

__all__ = ["TLS"]
