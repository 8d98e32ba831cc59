"""Helpers that several folders of tests share.

    agents        agents in one loop over the memory network, and the secret they share
    browser       the page in Chromium
    certificates  TLS certificates issued for one test
    forks         run something in a forked child
    namespaces    two network namespaces that act as two hosts
    waiting       `until`: wait for a state that has no event

Fixtures stay in the `conftest.py` of their folder. Nothing here imports a test.
"""
