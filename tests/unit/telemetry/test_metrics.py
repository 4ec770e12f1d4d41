"""Histograms, and the server that answers scrapes."""

import gzip
import socket
import urllib.error
import urllib.request

import pytest

from loopline.telemetry import exposition
from loopline.telemetry.exposition import MetricsServer
from loopline.telemetry.metrics import Definition, Histogram, Kind, counts_by, histogram_of, registry_of

SIZES = Definition("sizes_bytes", Kind.HISTOGRAM, "Sizes.", ("of",))
ENDS = Definition("ends_total", Kind.COUNTER, "Ends.", ("how",))


def test_a_histogram_counts_up_to_and_with_each_bound() -> None:
    histogram = Histogram((1.0, 2.0, 5.0))
    for value in (0.5, 1.0, 1.5, 5.0, 7.0):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2), ("2.0", 3), ("5.0", 4), ("+Inf", 5)]
    assert histogram.sum == 15.0
    assert histogram.count == 5


def served(host: str = "127.0.0.1", path: str = "/metrics", **headers: str) -> bytes:
    histogram = Histogram((1.0,))
    histogram.observe(0.5)
    registry = registry_of(
        lambda: [histogram_of(SIZES, {("all",): histogram})], lambda: [counts_by(ENDS, ("good", "bad"), {"bad": 2})]
    )
    server = MetricsServer(registry, host, 0)
    address = f"[{host}]" if ":" in host else host
    try:
        request = urllib.request.Request(f"http://{address}:{server.port}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return bytes(answer.read())
    finally:
        server.close()


def test_a_scrape_shows_every_label_and_bucket() -> None:
    lines = served().decode().splitlines()
    assert "# TYPE sizes_bytes histogram" in lines
    assert 'sizes_bytes_bucket{le="1.0",of="all"} 1.0' in lines
    assert 'sizes_bytes_bucket{le="+Inf",of="all"} 1.0' in lines
    assert 'sizes_bytes_sum{of="all"} 0.5' in lines
    assert 'ends_total{how="good"} 0.0' in lines
    assert 'ends_total{how="bad"} 2.0' in lines


def test_a_scrape_may_be_zipped_and_in_the_open_format() -> None:
    zipped = served(**{"Accept-Encoding": "gzip", "Accept": "application/openmetrics-text; version=1.0.0"})
    text = gzip.decompress(zipped).decode()
    assert "# TYPE ends counter" in text
    assert text.endswith("# EOF\n")


def test_a_connection_that_says_nothing_is_closed_and_no_name_is_looked_up(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> str:
        raise AssertionError("a name was looked up")

    monkeypatch.setattr(socket, "getfqdn", fail)
    monkeypatch.setattr(exposition._Silent, "timeout", 0.05)
    server = MetricsServer(registry_of(), "127.0.0.1", 0)
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as silent:
            assert silent.recv(1) == b""
    finally:
        server.close()
    assert capfd.readouterr().err == ""


def test_other_paths_are_not_found_and_say_what_is() -> None:
    with pytest.raises(urllib.error.HTTPError) as raised:
        served(path="/targets")
    assert raised.value.code == 404
    assert raised.value.read() == b"/metrics is here\n"
    raised.value.close()


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_an_ipv6_address_is_listened_on() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    assert b"ends_total" in served("::1")
