"""``kvtide serve session|lease|routing|all``."""

import asyncio
import logging
import signal
from collections.abc import Coroutine, Sequence

import click
import uvloop

from kvtide.cli.settings import settings_command
from kvtide_services.app import ALL, App
from kvtide_services.config import LeaseSettings, RoutingSettings, ServeSettings, SessionSettings

serve = click.Group("serve", help="Run the session, lease and routing services, each alone or together.")


def run(settings: ServeSettings, services: Sequence[str]) -> None:
    """Serves until SIGTERM or SIGINT."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    uvloop.run(_run(settings, services))


async def _run(settings: ServeSettings, services: Sequence[str]) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    try:
        app = App(settings, services)
        await app.start()
    except (OSError, ValueError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
    logging.getLogger(__name__).info("Serving %s on %s:%d", ", ".join(services), settings.host, app.port)
    try:
        await _first(stopped.wait(), app.broken())
    finally:
        await app.stop()


async def _first(*waits: Coroutine[object, object, object]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
    for task in done:
        task.result()


@settings_command(SessionSettings, "session")
def session(settings: SessionSettings) -> None:
    """Run the session service."""
    run(settings, ("session",))


@settings_command(LeaseSettings, "lease")
def lease(settings: LeaseSettings) -> None:
    """Run the lease service."""
    run(settings, ("lease",))


@settings_command(RoutingSettings, "routing")
def routing(settings: RoutingSettings) -> None:
    """Run the routing service."""
    run(settings, ("routing",))


@settings_command(ServeSettings, "all")
def everything(settings: ServeSettings) -> None:
    """Run all three services behind one port, for local use."""
    run(settings, ALL)


for command in (session, lease, routing, everything):
    serve.add_command(command)
