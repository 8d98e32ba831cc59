"""Starting and stopping: workers, local clusters, membership, the launcher's environment."""

from aiograd.rpc.transport.tls import TLS

__all__ = ["TLS"]
