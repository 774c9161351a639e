"""``kvtide serve session|lease|routing|all``."""

import asyncio
import logging
import signal

import click
import uvloop

from kvtide.cli.settings import settings_command
from kvtide_services.app import ALL, App
from kvtide_services.config import ServeSettings

serve = click.Group("serve", help="Run the session, lease and routing services, each alone or together.")


def run(settings: ServeSettings, services: tuple[str, ...]) -> None:
    """Serves until SIGTERM or SIGINT."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    uvloop.run(_run(settings, services))


async def _run(settings: ServeSettings, services: tuple[str, ...]) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    try:
        app = App(settings, services)
    except (OSError, ValueError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
    await app.start()
    logging.getLogger(__name__).info("Serving %s on %s:%d", ", ".join(services), settings.host, app.port)
    await stopped.wait()
    await app.stop()


@settings_command(ServeSettings, "session")
def session(settings: ServeSettings) -> None:
    """Run the session service."""
    run(settings, ("session",))


@settings_command(ServeSettings, "lease")
def lease(settings: ServeSettings) -> None:
    """Run the lease service."""
    run(settings, ("lease",))


@settings_command(ServeSettings, "routing")
def routing(settings: ServeSettings) -> None:
    """Run the routing service."""
    run(settings, ("routing",))


@settings_command(ServeSettings, "all")
def everything(settings: ServeSettings) -> None:
    """Run all three services behind one port, for local use."""
    run(settings, ALL)


for command in (session, lease, routing, everything):
    serve.add_command(command)
