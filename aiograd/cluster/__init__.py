"""Clusters: starting, joining, leaving and stopping workers.

    api           functions for a program that is one worker: init_rpc, shutdown, barrier …
    worker        `Worker`, the composition root: plugs agent, membership and layers together
    cluster       `Cluster`: workers that this process drives, over a small protocol for hosts
    handle        `Handle`: one worker of a cluster, to call it
    display       a cluster as a table in a notebook
    local         `LocalCluster`: processes of this machine, or tasks of this loop
    engines/      clusters whose workers live inside Dask, Ray and others
    launch        the commands `aiograd run` and `aiograd worker`
    config        arguments and the launcher's environment become a `WorkerPlan`
    joining/      from a plan to a worker that listens and has found its coordinator
    membership/   who is a member, who coordinates, barriers; and when nothing is under way
    logs          the output of workers, for those who look at their cluster
    processes/    worker processes: spawn, forkserver, worker_main, malloc

Imports go downwards: local, engines ─▶ cluster ─▶ handle ─▶ worker; api, launch ─▶ worker ─▶
membership, joining ─▶ config. Of the layers below, only `worker` knows `rref`, `dist` and
`autograd`; the others use `rpc` and `wire` alone. Log lines go to the logger "aiograd.cluster".
"""

from typing import TYPE_CHECKING, Any

# Public under this name: `Options(tls=aiograd.cluster.TLS(cert, key, ca))`.
from aiograd.rpc.transport.tls import TLS

if TYPE_CHECKING:
    from aiograd.cluster.cluster import Cluster
    from aiograd.cluster.engines.dask import DaskCluster
    from aiograd.cluster.engines.mpi import from_mpi
    from aiograd.cluster.engines.ray import RayCluster
    from aiograd.cluster.engines.ssh import SSHCluster
    from aiograd.cluster.local import LocalCluster

__all__ = ["TLS", "Cluster", "DaskCluster", "LocalCluster", "RayCluster", "SSHCluster", "from_mpi"]

# Imported when asked for: modules of this package are imported one by one, and an engine only by
# those who use it.
_LATER = {
    "Cluster": "cluster",
    "DaskCluster": "engines.dask",
    "LocalCluster": "local",
    "RayCluster": "engines.ray",
    "SSHCluster": "engines.ssh",
    "from_mpi": "engines.mpi",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'aiograd.cluster' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"aiograd.cluster.{_LATER[name]}"), name)
