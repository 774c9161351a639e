"""Child processes with logs, each the leader of a process group that is ended as a whole."""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvtide_bench.local.signals import deferred

_POLL = 0.1


class NotReady(RuntimeError):
    """A process ended or did not become ready; the message has the end of its log."""


def free_port() -> int:
    """A free port of the loopback interface, below those that the kernel gives to outgoing connections."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def answers(url: str, timeout: float = 2.0) -> bool:
    """Whether an HTTP GET of ``url`` is answered with 200."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def listens(port: int) -> bool:
    """Whether somebody accepts connections on a port of the loopback interface."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _with_parent() -> list[str]:
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM", "--"] if setpriv else []


class Process:
    """A command that can be started, paused, killed and started again."""

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        """``env`` is added to this process's own environment."""
        self.name = name
        self.argv = list(argv)
        self._env = dict(env)
        self.log = log
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process and group id. Raises NotReady when it does not run."""
        if self._child is None:
            raise NotReady(f"{self.name} is not running")
        return self._child.pid

    @property
    def running(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        """Starts it in a session of its own; output is appended to the log.

        Where the system has ``setpriv``, the process gets SIGTERM when the thread that called this ends, even if that
        was killed: start what is to live on from the main thread.
        """
        with self.log.open("ab") as log, deferred():  # else an interrupt here could lose track of the child
            self._child = subprocess.Popen(
                [*_with_parent(), *self.argv],
                env={**os.environ, **self._env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until(self, ready: Callable[[], bool], seconds: float) -> None:
        """Raises NotReady when it ends first or ``seconds`` pass."""
        deadline = time.monotonic() + seconds
        while not ready():
            if not self.running:
                raise NotReady(f"{self.name} ended while starting.\n{self.tail()}")
            if time.monotonic() > deadline:
                raise NotReady(f"{self.name} was not ready after {seconds:.0f} s.\n{self.tail()}")
            time.sleep(_POLL)

    def pause(self) -> None:
        """-STOP for the whole group."""
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """-CONT for the whole group."""
        os.killpg(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """-KILL for the whole group."""
        self._signal(signal.SIGKILL)
        self._reap()

    def ask_to_stop(self) -> None:
        """SIGTERM for the whole group, paused or not, without waiting. Safe when it does not run."""
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)

    def stop(self, grace: float = 15.0) -> float:
        """SIGTERM, SIGKILL after ``grace`` seconds; returns how long it took. Safe when it does not run."""
        started = time.monotonic()
        if self._child is None:
            return 0.0
        self.ask_to_stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(grace)
        took = time.monotonic() - started
        self._signal(signal.SIGKILL)
        self._reap()
        return took

    def tail(self, lines: int = 25) -> str:
        """The end of the log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def _signal(self, number: int) -> None:
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, number)

    def _reap(self) -> None:
        if self._child is not None:
            self._child.wait()
            self._child = None
