"""Settings from vLLM's extra config: wrong ones stop the engine at start, with the name of what is wrong."""

from pathlib import Path
from typing import Any

import pytest

from kvtide_connector.settings import ConnectorSettings, nanoseconds


def test_defaults_are_the_documented_ones() -> None:
    settings = ConnectorSettings.from_extra_config({})
    assert (settings.bidirectional_kv_xfer, settings.decoder_kv_blocks_ttl) == (False, 120.0)
    assert (settings.kv_recompute_threshold, settings.kvtide_ticket_duration) == (64, 30.0)


def test_vllms_own_keys_pass_by() -> None:
    settings = ConnectorSettings.from_extra_config({"backends": ["UCX"], "decoder_kv_blocks_ttl": 480})
    assert settings.decoder_kv_blocks_ttl == 480.0


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"kvtide_leas_address": "x"}, "kvtide_leas_address"),
        ({"decoder_kv_blocks_ttl": "120"}, "decoder_kv_blocks_ttl"),
        ({"decoder_kv_blocks_ttl": 0}, "decoder_kv_blocks_ttl"),
        ({"kvtide_ask_timeout": -1.0}, "kvtide_ask_timeout"),
        ({"bidirectional_kv_xfer": 1}, "bidirectional_kv_xfer"),
        ({"kv_recompute_threshold": True}, "kv_recompute_threshold"),
        ({"kv_recompute_threshold": -1}, "kv_recompute_threshold"),
        ({"kvtide_ticket_pool_share": 1.5}, "kvtide_ticket_pool_share"),
        ({"kvtide_ticket_duration": 1, "kvtide_ticket_margin": 0.5}, "kvtide_ticket_margin"),
    ],
)
def test_wrong_settings_are_refused_by_name(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ConnectorSettings.from_extra_config(extra)


def test_keys_are_read_from_files_without_trailing_newlines(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    assert ConnectorSettings(kvtide_shared_key_file=str(tmp_path / "key")).shared_key() == b"secret"
    assert ConnectorSettings().shared_key() == b""


def test_seconds_become_nanoseconds() -> None:
    assert nanoseconds(0.25) == 250_000_000
