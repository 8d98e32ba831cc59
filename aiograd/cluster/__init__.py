"""Starting and stopping: workers, local clusters, membership, the launcher's environment."""
