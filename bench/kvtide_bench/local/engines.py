"""How a vLLM engine of a local deployment is started."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtide_bench.local.processes import Process, answers, free_port

SERVED_NAME = "smollm2"

IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""vLLM's own choice on CPU is a worker process, which polls with ``sched_yield``. Linux 6.18 may starve it for that as
long as another engine is awake on its core: 30 s were seen. So the worker stays in the engine's process."""


@dataclass(frozen=True)
class EngineSpec:
    """One engine: ``role`` "prefill", "decode", or "plain" for a vLLM without any connector.

    ``args`` and ``env`` are added to the server's own, ``connector`` to its ``kv_connector_extra_config``. ``module``
    has the class KvtideConnector.
    """

    name: str
    role: str
    args: tuple[str, ...] = ()
    connector: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    kv_space_gib: int = 2
    module: str = "kvtide_connector.connector"

    def __post_init__(self) -> None:
        if self.role not in ("prefill", "decode", "plain"):
            raise ValueError(f"role must be prefill, decode or plain, not {self.role!r}")


@dataclass(frozen=True)
class EnginePlace:
    """What all engines of a deployment share."""

    python: Path
    model: Path
    dtype: str
    block_size: int
    max_model_len: int
    lease_address: str
    shared_key_file: Path
    run_dir: Path


class Engine:
    """A vLLM server as a process."""

    def __init__(self, spec: EngineSpec, place: EnginePlace) -> None:
        self.spec = spec
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._side_port = free_port()
        self.process = Process(spec.name, self._argv(place), self._env(), place.run_dir / f"{spec.name}.log")

    def start(self) -> None:
        """Starts it without waiting."""
        self.process.start()

    def wait(self, seconds: float) -> None:
        """Until it serves. Raises NotReady."""
        self.process.wait_until(lambda: answers(f"{self.url}/health"), seconds)

    def _argv(self, place: EnginePlace) -> list[str]:
        argv = [str(place.python), "-m", "vllm.entrypoints.openai.api_server"]
        argv += ["--model", str(place.model), "--served-model-name", SERVED_NAME]
        argv += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", place.dtype]
        argv += ["--block-size", str(place.block_size), "--max-model-len", str(place.max_model_len)]
        argv += ["--enforce-eager", "--distributed-executor-backend", IN_PROCESS]
        argv += ["--enable-prompt-tokens-details", *self.spec.args]
        if self.spec.role != "plain":
            argv += ["--kv-transfer-config", json.dumps(self._transfer(place))]
        return argv

    def _transfer(self, place: EnginePlace) -> dict[str, Any]:
        return {
            "kv_connector": "KvtideConnector",
            "kv_connector_module_path": self.spec.module,
            "kv_role": "kv_producer" if self.spec.role == "prefill" else "kv_consumer",
            "kv_connector_extra_config": {
                "bidirectional_kv_xfer": True,
                "kvtide_lease_address": place.lease_address,
                "kvtide_engine_name": self.spec.name,
                "kvtide_http_url": self.url,
                "kvtide_shared_key_file": str(place.shared_key_file),
                **self.spec.connector,
            },
        }

    def _env(self) -> dict[str, str]:
        return {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
            "VLLM_CPU_KVCACHE_SPACE": str(self.spec.kv_space_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self._side_port),
            "VLLM_NO_USAGE_STATS": "1",
            **self.spec.env,
        }
