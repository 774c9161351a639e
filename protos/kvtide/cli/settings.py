"""Command-line options and environment variables made from frozen settings dataclasses.

Each field of a settings class is one option: ``--its-name``, or the environment variable ``KVTIDE_ITS_NAME``. A field
declared with :func:`setting` carries its help text; durations are ``timedelta`` fields, given in seconds.
"""

import dataclasses
import typing
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import click

T = typing.TypeVar("T")


def setting(default: Any, help: str) -> Any:
    """A dataclass field with a default and the help text of its option."""
    return dataclasses.field(default=default, metadata={"help": help})


class _Seconds(click.ParamType[timedelta]):
    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        if isinstance(value, timedelta):
            return value
        try:
            return timedelta(seconds=float(value))
        except (TypeError, ValueError, OverflowError):
            self.fail(f"{value!r} is not a number of seconds", param, ctx)


def _option(field: dataclasses.Field[Any], kind: Any) -> Callable[[Any], Any]:
    default = field.default.total_seconds() if isinstance(field.default, timedelta) else field.default
    flag = "--" + field.name.replace("_", "-")
    if kind is bool:
        flag += "/--no-" + field.name.replace("_", "-")
    return click.option(
        flag,
        field.name,
        type=_Seconds() if kind is timedelta else kind,
        default=default,
        envvar="KVTIDE_" + field.name.upper(),
        show_default=True,
        show_envvar=True,
        help=field.metadata.get("help", ""),
    )


def settings_command(cls: type[T], name: str) -> Callable[[Callable[[T], None]], click.Command]:
    """Makes a command whose options are the fields of ``cls``; a ValueError of its checks is a usage error."""

    def wrap(run: Callable[[T], None]) -> click.Command:
        def call(**values: Any) -> None:
            try:
                settings = cls(**values)
            except ValueError as error:
                raise click.UsageError(str(error)) from error
            run(settings)

        hints = typing.get_type_hints(cls)
        for field in reversed(dataclasses.fields(cls)):  # type: ignore[arg-type]  # T is a dataclass by contract
            call = _option(field, hints[field.name])(call)
        return click.command(name, help=run.__doc__)(call)

    return wrap
