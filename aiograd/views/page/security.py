"""Who may see the page: every process of this host that has its address. Pure.

token     256 random bits, the first part of every path: who does not know it gets nothing
host      the name in the request must be one of ours: a name of the web that an attacker lets
          point to 127.0.0.1 (DNS rebinding) would make the page a page of the attacker's
method    GET and HEAD: there is nothing to change
headers   no script, style or frame of others; no referrer, which would carry the token; pictures
          may be blobs, which only our own script makes
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection, Mapping
from typing import Final

HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
METHODS: Final = frozenset({"GET", "HEAD"})
# What a browser says of where a request comes from. A link in a mail or a chat opens the page
# ("cross-site", as a navigation); nothing else of another site may read it.
_OWN: Final = frozenset({"same-origin", "none"})


def refusal(
    method: str,
    path_token: str,
    headers: Mapping[str, str],
    token: str,
    hosts: Collection[str],
) -> tuple[int, str] | None:
    """Return status and reason if a request is refused; None if it is answered."""
    if not is_own_host(headers.get("Host", ""), hosts):
        return 403, "this page does not have that host name"
    if method not in METHODS:
        return 405, "this page can only be read"
    if not hmac.compare_digest(path_token.encode(), token.encode()):
        return 403, "this is not the address of the page; the program that serves it has it"
    site, mode = headers.get("Sec-Fetch-Site", "none"), headers.get("Sec-Fetch-Mode", "navigate")
    if site not in _OWN and mode != "navigate":
        return 403, "another site may not read this page"
    return None


def is_own_host(host: str, hosts: Collection[str]) -> bool:
    """Tell whether the host of a request means this machine, or is one that was allowed."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    name = name.strip("[]").lower()
    if name == "localhost" or name in hosts:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
