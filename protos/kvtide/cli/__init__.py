"""The ``kvtide`` command.

Subcommands are entry points (group ``kvtide.commands``) of the distributions that implement them.
"""

from importlib.metadata import entry_points


def main() -> None:
    """Runs the command line; exits 2 when the extra ``kvtide[cli]`` is missing."""
    try:
        import click
    except ModuleNotFoundError:
        raise SystemExit("the kvtide command needs the extra: pip install 'kvtide[cli]'") from None
    group = click.Group("kvtide", help="Bidirectional KV cache reuse for disaggregated vLLM.")
    for point in sorted(entry_points(group="kvtide.commands"), key=lambda p: p.name):
        group.add_command(point.load(), name=point.name)
    group(auto_envvar_prefix="KVTIDE")
