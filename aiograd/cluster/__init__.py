"""Clusters: starting, joining, leaving and stopping workers.

    api           functions for a program that is one worker: init_rpc, shutdown, barrier …
    worker        `Worker`, the composition root: plugs agent, membership and layers together
    cluster       `Cluster`: workers that this process drives, over a small protocol for hosts
    handle        `Handle`: one worker of a cluster, to call it
    display       a cluster as a table in a notebook
    local         `LocalCluster`: processes of this machine, or tasks of this loop
    engine        what clusters on other engines share
    engine_values   references of other engines in our calls
    dask          `DaskCluster`: workers inside those of Dask
    ray           `RayCluster`: workers inside actors of Ray
    launch        the commands `aiograd run` and `aiograd worker`
    config        arguments and the launcher's environment become a `WorkerPlan`
    invitation    `Invitation`: what another process needs to join; versions that have to fit
    rendezvous    rendezvous addresses, the rendezvous file, secret files
    folders       private folders for Unix sockets; removes those of killed processes
    listening     where a worker listens and what it tells others
    bootstrap     sockets, dialling the coordinator, finding the secret
    membership    who is a member: decisions and copies, without I/O
    succession    who becomes the coordinator when it is lost, without I/O
    member        every worker's end of the membership services
    coordinator   the coordinator's end of the membership services
    collectives   barriers and gathers
    logs          the output of workers, for those who look at their cluster
    termination   when no call is under way anywhere, without I/O
    processes/    worker processes: spawn, forkserver, worker_main, malloc

Imports go downwards: local ─▶ cluster ─▶ handle ─▶ worker; api, launch ─▶ worker ─▶ coordinator ─▶
member ─▶ collectives, membership; worker ─▶ bootstrap ─▶ config, listening ─▶ invitation ─▶
rendezvous. Of the layers below, only `worker` knows `rref`, `dist` and `autograd`; the others use
`rpc` and `wire` alone. Log lines go to the logger "aiograd.cluster".
"""

from typing import TYPE_CHECKING, Any

# Public under this name: `Options(tls=aiograd.cluster.TLS(cert, key, ca))`.
from aiograd.rpc.transport.tls import TLS

if TYPE_CHECKING:
    from aiograd.cluster.cluster import Cluster
    from aiograd.cluster.dask import DaskCluster
    from aiograd.cluster.local import LocalCluster
    from aiograd.cluster.ray import RayCluster

__all__ = ["TLS", "Cluster", "DaskCluster", "LocalCluster", "RayCluster"]

# Imported when asked for: modules of this package are imported one by one, and an engine only by
# those who use it.
_LATER = {
    "Cluster": "cluster",
    "DaskCluster": "dask",
    "LocalCluster": "local",
    "RayCluster": "ray",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'aiograd.cluster' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"aiograd.cluster.{_LATER[name]}"), name)
