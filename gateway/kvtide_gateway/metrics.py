"""Prometheus metrics of the gateway, in a registry of its own."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvtide_gateway.turn import Trace

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """What happened to requests."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests by route, strategy and status.", "route strategy status")
        self._fallbacks = self._counter("fallbacks", "Rungs of the ladder that failed.", "strategy reason")
        self._reused = self._counter("reused_tokens", "Prompt tokens that P read from D.", "")
        self._reports = self._counter("turn_reports", "Reports of turns to the session service.", "outcome")
        self._broken = self._counter("broken_streams", "Answers that an engine broke off.", "")
        self._cancelled = self._counter("cancelled", "Requests whose client went away.", "")
        self._open = Gauge("kvtide_gateway_open_requests", "Requests under way.", registry=self.registry)
        self._seconds = Histogram(
            "kvtide_gateway_seconds",
            "Time of each stage of a turn.",
            ["stage"],
            buckets=_BUCKETS,
            registry=self.registry,
        )

    def _counter(self, name: str, text: str, labels: str) -> Counter:
        return Counter(f"kvtide_gateway_{name}", text, labels.split(), registry=self.registry)

    def opened(self) -> None:
        """A request came."""
        self._open.inc()

    def closed(self) -> None:
        """A request ended."""
        self._open.dec()

    def answered(self, route: str, strategy: str, status: int) -> None:
        """A request was answered; ``strategy`` is "none" where there was no turn."""
        self._requests.labels(route, strategy, str(status)).inc()

    def turn(self, trace: Trace) -> None:
        """A turn's answer began, or failed to."""
        for strategy, cause in trace.falls:
            self._fallbacks.labels(strategy, cause).inc()
        for stage in ("plan", "prefill", "first_byte"):
            seconds = getattr(trace, f"{stage}_seconds")
            if seconds:
                self._seconds.labels(stage).observe(seconds)
        if trace.strategy == "PREFILL_REUSE":
            self._reused.inc(trace.reused)

    def reported(self, outcome: str) -> None:
        """The report of a turn ended "ok", "failed" or was "dropped"."""
        self._reports.labels(outcome).inc()

    def stream_broken(self) -> None:
        """An engine broke off its answer."""
        self._broken.inc()

    def client_gone(self) -> None:
        """A client went away."""
        self._cancelled.inc()

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)
