import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtide_bench.local import NotReady, Process, free_port
from kvtide_bench.local.processes import answers, listens
from kvtide_bench.local.signals import ENDING, deferred, interrupt_once

MakeProcess = Callable[..., Process]
FOREVER = "import signal; print('ready'); signal.pause()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); signal.pause()"
WITH_CHILD = f"import subprocess; subprocess.run(['python3', '-u', '-c', {FOREVER!r}])"


def ready(process: Process) -> None:
    process.start()
    process.wait_until(lambda: "ready" in process.tail(), 20)


def alive(group: int) -> bool:
    """Whether any process of a group has not ended; zombies do not count."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            return True
    return False


def gone(group: int) -> bool:
    deadline = time.monotonic() + 10
    while alive(group) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not alive(group)


def test_stopping_ends_children_too(process: MakeProcess) -> None:
    one = process(WITH_CHILD)
    ready(one)
    group = one.pid
    one.stop()
    assert gone(group)
    assert not one.running


def test_a_process_that_ignores_the_request_is_killed(process: MakeProcess) -> None:
    one = process(STUBBORN)
    ready(one)
    group = one.pid
    assert one.stop(grace=0.1) >= 0.1
    assert gone(group)


def test_a_paused_process_can_be_stopped_and_started_again(process: MakeProcess) -> None:
    one = process(FOREVER)
    ready(one)
    first = one.pid
    one.pause()
    one.stop()
    ready(one)
    assert one.running
    assert one.pid != first


def test_an_early_end_shows_the_end_of_the_log(process: MakeProcess) -> None:
    one = process("print('no such model'); raise SystemExit(3)")
    one.start()
    with pytest.raises(NotReady, match=r"ended while starting(.|\n)*no such model"):
        one.wait_until(lambda: False, 20)


def test_a_slow_start_ends_at_its_deadline(process: MakeProcess) -> None:
    one = process(FOREVER)
    ready(one)
    with pytest.raises(NotReady, match="not ready after 0 s"):
        one.wait_until(lambda: False, 0.0)


def test_the_environment_is_added_to_our_own(process: MakeProcess) -> None:
    one = process("import os; print('ready', os.environ['ADDED'], len(os.environ['PATH']) > 0)", ADDED="yes")
    one.start()
    one.wait_until(lambda: "ready yes True" in one.tail(), 20)


def test_nothing_is_to_stop_before_the_start(process: MakeProcess) -> None:
    one = process(FOREVER)
    assert one.stop() == 0.0
    with pytest.raises(NotReady, match="is not running"):
        _ = one.pid


def test_ports_are_seen_as_taken_and_free() -> None:
    port = free_port()
    assert not listens(port)
    assert not answers(f"http://127.0.0.1:{port}/health", timeout=0.5)
    with socket.create_server(("127.0.0.1", port)):
        assert listens(port)


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {each: signal.getsignal(each) for each in ENDING}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.usefixtures("handlers")
def test_the_first_signal_interrupts_and_further_ones_are_ignored() -> None:
    interrupt_once()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.usefixtures("handlers")
def test_a_deferred_signal_arrives_when_the_block_is_left() -> None:
    interrupt_once()
    reached = False
    with pytest.raises(KeyboardInterrupt), deferred():
        signal.raise_signal(signal.SIGINT)
        reached = True
    assert reached


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_supervisor_that_ends_leaves_nothing_running(number: signal.Signals, tmp_path: Path) -> None:
    """One like the demo's: interrupted and hurried by a second signal, or killed without a chance to clean up."""
    code = f"""
import sys, time
from pathlib import Path
from kvtide_bench.local import Process
from kvtide_bench.local.signals import interrupt_once
interrupt_once()
child = Process("child", ["python3", "-u", "-c", {FOREVER!r}], {{}}, Path({str(tmp_path / "child.log")!r}))
try:
    child.start()
    child.wait_until(lambda: "ready" in child.tail(), 20)
    print("group", child.pid, "ready")
    time.sleep(60)
finally:
    child.stop()
"""
    supervisor = Process(
        "s", [sys.executable, "-u", "-c", code], {"PYTHONPATH": ":".join(sys.path)}, tmp_path / "s.log"
    )
    supervisor.start()
    try:
        supervisor.wait_until(lambda: "ready" in supervisor.tail(), 20)
        group = int(supervisor.tail().split()[1])
        os.kill(supervisor.pid, number)
        os.kill(supervisor.pid, number)
        assert gone(group)
        assert gone(supervisor.pid)
    finally:
        supervisor.kill()
