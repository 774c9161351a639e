"""What makes the KV of two engines interchangeable, as one digest."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SAMPLES = 32
_SAMPLE_BYTES = 65536


def pairing_digest(vllm_config: Any, vllm_version: str) -> str:
    """Hex SHA-256 over release, model config, weights, adapters, dtypes, block size and hash seed of an engine.

    Weights enter by name, size and samples spread over each file: reading them whole would double the start-up time.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    digest = hashlib.sha256()
    facts = {
        "vllm": vllm_version,
        "config": _plain_config(model.hf_config),
        "revision": model.revision,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_dtype": str(cache.cache_dtype),
        "block_size": cache.block_size,
        "hash_algorithm": cache.prefix_caching_hash_algo,
        "hash_seed": _hash_seed(cache.prefix_caching_hash_algo),
        "adapters": _adapters(vllm_config),
    }
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    for part in _weights(model.model):
        digest.update(part)
    return digest.hexdigest()


def _plain_config(config: Any) -> dict[str, Any]:
    values: dict[str, Any] = config.to_dict()
    return {key: value for key, value in values.items() if key != "_name_or_path"}


def _adapters(vllm_config: Any) -> str:
    lora = vllm_config.lora_config
    return "" if lora is None else f"rank {lora.max_lora_rank}"


def _hash_seed(algorithm: str) -> str:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    hash_function = get_hash_fn_by_name(algorithm)
    return hash_function(resolve_none_hash_seed(hash_function)).hex()


def _weights(model: str) -> Iterator[bytes]:
    directory = Path(model)
    if not directory.is_dir():
        yield model.encode()
        return
    for path in sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin")):
        yield f"{path.name}:{path.stat().st_size}".encode()
        yield from _samples(path)


def _samples(path: Path) -> Iterator[bytes]:
    stride = max(_SAMPLE_BYTES, path.stat().st_size // _SAMPLES)
    with path.open("rb") as file:
        for start in range(0, path.stat().st_size, stride):
            file.seek(start)
            yield file.read(_SAMPLE_BYTES)
