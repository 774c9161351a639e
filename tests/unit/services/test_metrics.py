"""Counters tell what happened, and the interfaces behind them know nothing of it."""

import socket
import urllib.request
from datetime import timedelta
from typing import Any

import pytest

from kvtide.lease.v1 import lease_pb2 as pb
from kvtide_services.errors import NoDecodeEngine, StoreUnavailable
from kvtide_services.metrics import Metrics, MetricsServer
from kvtide_services.routing.choice import Known, Plan, choose
from kvtide_services.routing.router import Wanted
from kvtide_services.store import SessionRecord, TurnRecord
from kvtide_services.store.memory import MemoryStore

SPAN = timedelta(seconds=10)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"kvtide_services_{name}_total", labels)


async def test_sessions_and_renewals_are_counted_by_outcome(clock: Any) -> None:
    metrics = Metrics()
    store = metrics.store(MemoryStore(clock, history=10))
    record = SessionRecord("t", "s1", SPAN, SPAN, timedelta(0), request_id="r")
    await store.create(record)
    await store.create(record)
    await store.record_turn("t", "s2", TurnRecord(1, "m", "d", "b"), SPAN)
    await store.record_turn("t", "s2", TurnRecord(2, "m", "d", "b"), SPAN)
    await store.renew("t", ["s1", "s2", "lost"], None)
    await store.close("t", "s1")
    await store.close("t", "s1")
    clock.now += 10
    await store.lapse()
    assert [value(metrics, "sessions", event=e) for e in ("opened", "closed", "lapsed")] == [2, 1, 1]
    assert [value(metrics, "renewals", outcome=o) for o in ("renewed", "lost")] == [2, 1]
    assert value(metrics, "turns") == 2


async def test_store_errors_are_counted_and_raised(clock: Any) -> None:
    metrics = Metrics()
    store = metrics.store(MemoryStore(clock, history=10))
    with pytest.raises(StoreUnavailable):
        await store.engines()
    assert value(metrics, "store_errors", operation="engines") == 1


async def test_plans_are_counted_by_strategy_and_what_was_known(engine: Any, lease: Any) -> None:
    class Planner:
        async def plan(self, wanted: Wanted) -> Plan:
            statuses = [pb.EngineStatus(engine=engine(name)) for name in ("prefill-0", "decode-0")]
            plan = choose(statuses if wanted.model == "m" else [], Known((lease(),)), 0, 64)
            if plan is None:
                raise NoDecodeEngine(wanted.model)
            return plan

        async def models(self) -> list[str]:
            return ["m"]

    metrics = Metrics()
    planner = metrics.planner(Planner())
    await planner.plan(Wanted("t", "m"))
    assert await planner.models() == ["m"]
    with pytest.raises(NoDecodeEngine):
        await planner.plan(Wanted("t", "other"))
    assert value(metrics, "plans", strategy="PREFILL_REUSE", why="held") == 1
    assert value(metrics, "plan_errors", error="NoDecodeEngine") == 1


def test_metrics_are_served_until_stopped() -> None:
    metrics = Metrics()
    metrics.ticket("granted")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = MetricsServer(metrics, "127.0.0.1", port)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
        assert b'kvtide_services_tickets_total{outcome="granted"} 1.0' in response.read()
    server.stop()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
