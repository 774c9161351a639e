import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from kvtide_bench.scrape import Change, read, settled

PAGE = """# HELP vllm:time_to_first_token_seconds …
vllm:time_to_first_token_seconds_sum{engine="0"} 1.5
vllm:time_to_first_token_seconds_sum{engine="1"} 0.5
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 640.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 60.0
vllm:nixl_xfer_time_seconds_sum{engine="0"} 0.25
kvtide:ask_microseconds_total{engine="0"} 4000.0
vllm:e2e_request_latency_seconds_count{engine="0"} %d
"""


@pytest.fixture
def engine() -> Iterator[str]:
    """An engine whose every third reading counts one more request."""
    seen = 0

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal seen
            seen += 1
            self.send_response(200)
            self.end_headers()
            self.wfile.write((PAGE % (seen // 3)).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_samples_are_summed_over_engines_and_kept_apart_by_source(engine: str) -> None:
    reading = read(engine)
    assert reading["vllm:time_to_first_token_seconds_sum"] == 2.0
    assert reading["vllm:prompt_tokens_by_source_total[external_kv_transfer]"] == 640.0
    assert reading["vllm:prompt_tokens_by_source_total[local_compute]"] == 60.0


def test_a_change_is_what_happened_since(engine: str) -> None:
    change = Change({"vllm:time_to_first_token_seconds_sum": 1.2}, read(engine))
    assert (change.ttft, change.transfer, change.asked, change.external_tokens) == (0.8, 0.25, 0.004, 640)


def test_a_settled_reading_counts_the_request(engine: str) -> None:
    before = read(engine)
    after = settled(engine, before)
    assert Change(before, after).of("vllm:e2e_request_latency_seconds_count") == 1


def test_an_engine_that_never_counts_is_not_waited_for_endlessly(engine: str) -> None:
    assert settled(engine, {"vllm:e2e_request_latency_seconds_count": 1e9}, timeout=0.0)
