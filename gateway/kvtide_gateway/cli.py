"""``kvtide gateway``."""

import logging

import click
import uvicorn

from kvtide.cli.settings import settings_command
from kvtide_gateway.app import build
from kvtide_gateway.config import GatewaySettings


@settings_command(GatewaySettings, "gateway")
def gateway(settings: GatewaySettings) -> None:
    """Run the OpenAI-compatible HTTP gateway."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        app = build(settings)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    uvicorn.run(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=max(1, round(settings.client_keepalive.total_seconds())),
        timeout_graceful_shutdown=max(1, round(settings.grace.total_seconds())),
    )
