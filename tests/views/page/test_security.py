"""Who may see the page."""

from __future__ import annotations

import pytest

from aiograd.views.page.security import HEADERS, is_own_host, refusal

TOKEN = "a-token"
OWN = {"Host": "127.0.0.1:8000"}


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8000", "localhost:1", "LOCALHOST", "[::1]:80", "127.9.9.9", "proxy.example"]
)
def test_names_of_this_host_and_allowed_ones_are_taken(host):
    assert is_own_host(host, {"proxy.example"})


@pytest.mark.parametrize(
    "host", ["", "evil.example", "127.0.0.1.evil.example", "10.0.0.1:80", "localhost.evil", "[::2]"]
)
def test_a_rebinding_name_is_refused(host):
    assert not is_own_host(host, set())
    assert refusal("GET", TOKEN, {"Host": host}, TOKEN, set())[0] == 403


def test_only_reading_with_the_token_is_answered():
    assert refusal("GET", TOKEN, OWN, TOKEN, set()) is None
    assert refusal("HEAD", TOKEN, OWN, TOKEN, set()) is None
    assert refusal("POST", TOKEN, OWN, TOKEN, set())[0] == 405
    for wrong in ("", "a-tokem", "ä"):
        assert refusal("GET", wrong, OWN, TOKEN, set())[0] == 403


def test_other_sites_may_open_the_page_and_read_nothing():
    cross = {**OWN, "Sec-Fetch-Site": "cross-site"}
    assert refusal("GET", TOKEN, {**cross, "Sec-Fetch-Mode": "no-cors"}, TOKEN, set())[0] == 403
    assert refusal("GET", TOKEN, {**cross, "Sec-Fetch-Mode": "navigate"}, TOKEN, set()) is None
    same = {**OWN, "Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}
    assert refusal("GET", TOKEN, same, TOKEN, set()) is None


def test_the_policy_allows_nothing_from_elsewhere_and_nothing_inline():
    policy = HEADERS["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "http" not in policy
