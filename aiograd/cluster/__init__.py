"""Starting and stopping: workers, local clusters, membership, the launcher's environment."""

from aiograd.rpc.tls import TLS

__all__ = ["TLS"]
