"""Typer commands whose help shows no type next to flags, because flags take no value."""

from typing import Any

from typer.core import TyperCommand, TyperGroup

__all__ = ["Group", "Verb"]


class Verb(TyperCommand):
    """A command."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, without a type for flags."""
        return _hide_flag_types(super().get_params(ctx))


class Group(TyperGroup):
    """A group of commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, without a type for flags."""
        return _hide_flag_types(super().get_params(ctx))


def _hide_flag_types(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params
