"""Commands whose help shows no type beside flags, which take no value."""

from typing import Any

from typer.core import TyperCommand, TyperGroup

__all__ = ["Group", "Verb"]


class Verb(TyperCommand):
    """One verb."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, flags without a type."""
        return _plain_flags(super().get_params(ctx))


class Group(TyperGroup):
    """Several verbs."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, flags without a type."""
        return _plain_flags(super().get_params(ctx))


def _plain_flags(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params
