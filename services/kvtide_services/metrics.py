"""Prometheus metrics of the services, in a registry of their own."""

import threading
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, start_http_server

from kvtide.lease.v1 import directive_pb2
from kvtide_services.errors import KvtideError, StoreUnavailable
from kvtide_services.observed import observed
from kvtide_services.routing.router import Planner
from kvtide_services.store import Opening, Store


class Metrics:
    """What happened."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._plans = self._counter("plans", "Plans by strategy and what was known.", "strategy why")
        self._unplanned = self._counter("plan_errors", "Requests that could not be planned.", "error")
        self._tickets = self._counter("tickets", "Tickets relayed, by outcome.", "outcome")
        self._sessions = self._counter("sessions", "Sessions by what happened to them.", "event")
        self._renewals = self._counter("renewals", "Renewals of sessions, by outcome.", "outcome")
        self._turns = self._counter("turns", "Turns reported.", "")
        self._store = self._counter("store_errors", "Operations that the store did not answer.", "operation")

    def _counter(self, name: str, text: str, labels: str) -> Counter:
        return Counter(f"kvtide_services_{name}", text, labels.split(), registry=self.registry)

    def ticket(self, outcome: str) -> None:
        """A ticket was relayed: "granted", or why not."""
        self._tickets.labels(outcome).inc()

    def store(self, store: Store) -> Store:
        """The store, counted."""
        return observed(store, self._stored, self._store_failed)

    def planner(self, planner: Planner) -> Planner:
        """The planner, counted."""
        return observed(planner, self._planned, self._plan_failed)

    def _stored(self, operation: str, result: Any) -> None:
        match operation:
            case "create" if result is Opening.OPENED:
                self._sessions.labels("opened").inc()
            case "record_turn":
                self._turns.inc()
                self._sessions.labels("opened").inc(int(result.opened))
            case "close" if result:
                self._sessions.labels("closed").inc()
            case "lapse":
                self._sessions.labels("lapsed").inc(len(result))
            case "renew":
                lost = result.count(None)
                self._renewals.labels("renewed").inc(len(result) - lost)
                self._renewals.labels("lost").inc(lost)

    def _store_failed(self, operation: str, error: KvtideError) -> None:
        if isinstance(error, StoreUnavailable):
            self._store.labels(operation).inc()

    def _planned(self, operation: str, result: Any) -> None:
        if operation == "plan":
            strategy = directive_pb2.Strategy.Name(result.strategy).removeprefix("STRATEGY_")
            self._plans.labels(strategy, result.why).inc()

    def _plan_failed(self, operation: str, error: KvtideError) -> None:
        self._unplanned.labels(type(error).__name__).inc()


class MetricsServer:
    """Answers Prometheus over HTTP from a thread of its own."""

    def __init__(self, metrics: Metrics, host: str, port: int) -> None:
        """Serves at once. Raises OSError when the port is taken."""
        self._server: WSGIServer
        self._thread: threading.Thread
        self._server, self._thread = start_http_server(port, host, metrics.registry)

    def stop(self) -> None:
        """Closes the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
