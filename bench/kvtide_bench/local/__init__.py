"""A whole deployment on this machine: store, services, gateway and real engines, each a process with its own ports."""

from kvtide_bench.local.deployment import Deployment, LocalSettings, engine_pair, patient_gateway
from kvtide_bench.local.engines import EngineSpec
from kvtide_bench.local.processes import NotReady, Process, free_port

__all__ = [
    "Deployment",
    "EngineSpec",
    "LocalSettings",
    "NotReady",
    "Process",
    "engine_pair",
    "free_port",
    "patient_gateway",
]
