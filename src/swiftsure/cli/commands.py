"""Typer commands whose help shows no type next to flags, because flags take no value."""

from typing import Any

from typer.core import TyperCommand, TyperGroup

__all__ = ["Group", "Verb"]


class _WithoutFlagTypes:
    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, without a type for flags."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Verb(_WithoutFlagTypes, TyperCommand):
    """A command."""


class Group(_WithoutFlagTypes, TyperGroup):
    """A group of commands."""
