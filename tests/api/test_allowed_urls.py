"""Which engine addresses may join: what a pattern means, and what it must never let through."""

import pytest

from prorl_gym.api.config import AllowedUrls, UrlPattern
from prorl_gym.inference.config import normalize_url


@pytest.mark.parametrize(
    ("pattern", "url"),
    [
        ("http://10.0.0.*:8000/v1", "http://10.0.0.7:8000/v1"),
        ("http://10.0.*.*:*", "http://10.0.3.4:31000/v1"),
        ("https://*.cluster.lan", "https://gpu-3.cluster.lan/v1"),
        ("https://node-*.lan:443/v1/", "https://NODE-12.lan/v1"),
        ("http://[::1]:*/v1", "http://[::1]:8000/v1"),
    ],
)
def test_a_pattern_fits(pattern: str, url: str) -> None:
    assert UrlPattern.parse(pattern).matches(normalize_url(url))


@pytest.mark.parametrize(
    ("pattern", "url"),
    [
        ("http://10.0.0.*:8000/v1", "http://10.0.0.7:8001/v1"),
        ("http://10.0.0.*:8000/v1", "https://10.0.0.7:8000/v1"),
        ("http://10.0.0.*:8000/v1", "http://10.0.0.7:8000/admin"),
        ("http://10.0.0.*:8000/v1", "http://10.0.0.7.evil.com:8000/v1"),
        ("http://10.0.0.*:8000/v1", "http://10.0.0.evil:8000/v1"),
        ("http://*.cluster.lan/v1", "http://a.b.cluster.lan/v1"),
        ("http://*.cluster.lan/v1", "http://evil.com/x.cluster.lan/v1"),
        ("http://node*.lan:*/v1", "http://node1.lan.evil.com:80/v1"),
        ("http://a.b/v1", "http://axb/v1"),
    ],
)
def test_a_pattern_swallows_no_separator(pattern: str, url: str) -> None:
    assert not UrlPattern.parse(pattern).matches(normalize_url(url))


@pytest.mark.parametrize("pattern", ["*", "http://*/v1", "http://*.*:8000/v1", "http://a/*", "ftp://a", "http://u@a.*"])
def test_what_is_no_pattern(pattern: str) -> None:
    with pytest.raises(ValueError):
        UrlPattern.parse(pattern)


def test_configured_engines_are_always_allowed() -> None:
    allowed = AllowedUrls(["http://127.0.0.1:1/v1"])
    assert "http://127.0.0.1:1/v1" in allowed
    assert "http://127.0.0.1:2/v1" not in allowed
