"""Finds lapsed sessions again and again."""

import asyncio
import logging

from kvtide_services.errors import StoreUnavailable
from kvtide_services.session.keeper import SessionKeeper

logger = logging.getLogger(__name__)


async def sweep_forever(keeper: SessionKeeper, interval: float) -> None:
    """Every ``interval`` seconds. Ends by cancellation."""
    while True:
        try:
            await keeper.sweep()
        except StoreUnavailable:
            logger.warning("The store does not answer; sessions lapse when it does")
        await asyncio.sleep(interval)
