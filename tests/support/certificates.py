"""TLS certificates issued for one test by an authority of its own."""

from __future__ import annotations

from pathlib import Path

import trustme

from aiograd.cluster import TLS


def issue(
    authority: trustme.CA,
    folder: Path,
    name: str,
    *,
    mutual: bool = True,
    trust: trustme.CA | None = None,
) -> TLS:
    """Issue a certificate for a worker's name; it trusts `trust`, by default its own authority."""
    leaf = authority.issue_cert(name)
    key, chain, roots = (folder / f"{name}.{kind}" for kind in ("key", "cert", "ca"))
    leaf.private_key_pem.write_to_path(key)
    for i, blob in enumerate(leaf.cert_chain_pems):
        blob.write_to_path(chain, append=i > 0)
    (trust or authority).cert_pem.write_to_path(roots)
    return TLS(chain, key, roots, mutual)
