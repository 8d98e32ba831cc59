"""Clusters whose workers live where another engine puts them.

    engine        what clusters on other engines share
    values        references of other engines in our calls
    dask          `DaskCluster`: workers inside those of Dask
    ray           `RayCluster`: workers inside actors of Ray
    mpi           `from_mpi`: the ranks of an MPI communicator as workers
    ssh           `SSHCluster`: workers on hosts that ssh reaches

An engine is imported only by those who use it; placement, lifetime and scaling stay with it, and
messages go directly between our workers.
"""
