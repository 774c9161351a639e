"""``kvtide demo`` and ``kvtide up``."""

import time
from pathlib import Path

import click

from kvtide.cli.settings import settings_command
from kvtide_bench import demo as demonstration
from kvtide_bench.config import DemoSettings, UpSettings
from kvtide_bench.local import Deployment, LocalSettings, NotReady
from kvtide_bench.local.deployment import stop_on_sigterm

_EXAMPLE = """
Two turns of one conversation; the second reports the tokens that P read from D:

  ask() {{ curl -si {url}/v1/chat/completions -H 'content-type: application/json' -d "$1" |
    grep -iE '^x-kvtide|content'; }}
  Q="Here is a note to remember. $(printf 'The tide turns twice a day. %.0s' $(seq 30)) What turns?"
  ask '{{"model":"smollm2","conversation_id":"c1","max_tokens":16,"temperature":0,
        "messages":[{{"role":"user","content":"'"$Q"'"}}]}}'
  ask '{{"model":"smollm2","conversation_id":"c1","max_tokens":16,"temperature":0,
        "messages":[{{"role":"user","content":"'"$Q"'"}},
                    {{"role":"assistant","content":"The tide."}},{{"role":"user","content":"How often?"}}]}}'
"""


@settings_command(DemoSettings, "demo")
def demo(settings: DemoSettings) -> None:
    """Hold one conversation with reuse off and on, on real engines; print a table, write charts and a JSON."""
    stop_on_sigterm()
    try:
        demonstration.run(settings)
    except NotReady as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        raise click.Abort from None


@settings_command(UpSettings, "up")
def up(settings: UpSettings) -> None:
    """Start a whole deployment and serve until Ctrl-C."""
    stop_on_sigterm()
    forced = ("--force-strategy", settings.force_strategy) if settings.force_strategy else ()
    local = LocalSettings(
        Path(settings.run_dir),
        dtype=settings.dtype,
        gateway_port=settings.gateway_port,
        gateway_args=forced,
        say=click.echo,
    )
    try:
        with Deployment(local) as deployment:
            click.echo(_EXAMPLE.format(url=deployment.url))
            click.echo("Serving until Ctrl-C")
            while deployment.gateway.running and deployment.services.running:
                time.sleep(0.5)
            raise click.ClickException("a part ended by itself; see the logs")
    except NotReady as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        click.echo("Stopped")
