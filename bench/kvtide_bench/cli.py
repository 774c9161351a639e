"""``kvtide demo`` and ``kvtide up``."""

import time
from collections.abc import Callable

import click
from openai import OpenAIError

from kvtide.cli.settings import settings_command
from kvtide_bench import demo as demonstration
from kvtide_bench.config import DemoSettings, UpSettings
from kvtide_bench.local import Deployment, LocalSettings, NotReady, patient_gateway
from kvtide_bench.local.signals import interrupt_once
from kvtide_bench.machine import dtype

_EXAMPLE = """
Two turns of one conversation; the second reports the tokens that were reused:

  ask() {{ curl -si {url}/v1/chat/completions -H 'content-type: application/json' -d "$1" |
    grep -iE '^(HTTP|x-kvtide)|content'; }}
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
    _guarded(lambda: demonstration.run(settings), f"logs are in {settings.directory / 'logs'}")


@settings_command(UpSettings, "up")
def up(settings: UpSettings) -> None:
    """Start a whole deployment and serve until Ctrl-C."""
    _guarded(lambda: _serve(settings), f"logs are in {settings.directory}")


def _serve(settings: UpSettings) -> None:
    force = ("--force-strategy", settings.force_strategy) if settings.force_strategy else ()
    local = LocalSettings(
        settings.directory,
        dtype=settings.dtype or dtype(),
        model=settings.model,
        gateway_port=settings.gateway_port,
        gateway_args=(*patient_gateway(), *force),
        say=click.echo,
    )
    with Deployment(local) as deployment:
        click.echo(_EXAMPLE.format(url=deployment.url))
        click.echo("Serving until Ctrl-C")
        while not (ended := deployment.ended()):
            time.sleep(0.5)
        raise NotReady(f"{ended.name} ended by itself.\n{ended.tail()}")


def _guarded(run: Callable[[], None], hint: str) -> None:
    interrupt_once()
    try:
        run()
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except (NotReady, OpenAIError, OSError) as error:
        raise click.ClickException(f"{error}\n{hint}") from error
    except KeyboardInterrupt:
        click.echo("Stopped")
        raise SystemExit(130) from None
