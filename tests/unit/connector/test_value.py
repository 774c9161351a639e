"""The value of a held lease: each factor alone, and what it must never prefer."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide_connector.value import Worth

WORTH = Worth(half_life=60, long_blocks=1000)


def value(**changes: Any) -> float:
    base: dict[str, Any] = {
        "own_blocks": 100,
        "idle": 0,
        "left": 120,
        "granted_ttl": 120,
        "renewed": True,
        "tenant_share": 0.0,
    }
    return WORTH.of(**{**base, **changes})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 1.1),
        ({"own_blocks": 1000}, 2.0),
        ({"own_blocks": 0}, 0.0),
        ({"idle": 60}, 0.55),
        ({"left": 30}, 0.275),
        ({"left": 0}, 0.0),
        ({"left": -5}, 0.0),
        ({"left": 240}, 1.1),
        ({"renewed": False}, 0.55),
        ({"tenant_share": 1.0}, 0.55),
    ],
)
def test_each_factor(changes: dict[str, Any], expected: float) -> None:
    assert value(**changes) == pytest.approx(expected)


def test_a_few_idle_giants_go_before_many_live_small_ones() -> None:
    assert value(own_blocks=5000, idle=240) < value(own_blocks=20, idle=5)


@given(st.integers(1, 10**6), st.integers(0, 10**4), st.integers(1, 120), st.floats(0, 1))
def test_more_tokens_less_idle_more_time_and_a_smaller_share_are_never_worth_less(
    own: int, idle: int, left: int, share: float
) -> None:
    base = value(own_blocks=own, idle=idle, left=left, tenant_share=share)
    assert value(own_blocks=own + 1, idle=idle, left=left, tenant_share=share) >= base
    assert value(own_blocks=own, idle=idle + 1, left=left, tenant_share=share) <= base
    assert value(own_blocks=own, idle=idle, left=left + 1, tenant_share=share) >= base
    assert value(own_blocks=own, idle=idle, left=left, tenant_share=share / 2) >= base
