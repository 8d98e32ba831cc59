"""From a plan to a worker that listens and has found its coordinator.

    bootstrap     sockets, dialling the coordinator, finding the secret
    listening     where a worker listens and what it tells others
    invitation    `Invitation`: what another process needs to join; versions that have to fit
    rendezvous    rendezvous addresses, the rendezvous file, secret files
    folders       private folders for Unix sockets; removes those of killed processes

Imports go downwards: bootstrap ─▶ listening ─▶ invitation ─▶ rendezvous ─▶ folders.
"""
