"""`Versions`: notices that a provider changed a model behind its name."""

import logging
from collections.abc import Mapping
from typing import Any

from swiftsure.cascade.endpoints import version_of
from swiftsure.certify.slices import any_part
from swiftsure.serve.engine import AnyPolicy

__all__ = ["Versions"]

log = logging.getLogger("swiftsure.serve")


class Versions:
    """The versions that models had in the calibration, and those that they answer as now.

    A version is what a response says of it: the model's dated name, and `system_fingerprint` where
    the provider has one. A policy whose calibration saw none is not checked.

    Attributes
    ----------
    changed : dict
        New versions, by name of the model.
    """

    def __init__(self) -> None:
        self.changed: dict[str, str] = {}
        self._known: dict[str, frozenset[str]] = {}

    def install(self, policy: AnyPolicy | None) -> None:
        """Check against another policy from now on; changes since the last one are forgotten."""
        found = {} if policy is None else any_part(policy).settings.get("versions")
        known = found if isinstance(found, Mapping) else {}
        self._known = {str(name): frozenset(each) for name, each in known.items()}
        self.changed = {}

    def saw(self, name: str, response: Mapping[str, Any]) -> None:
        """Compare a response's version with those of the calibration."""
        known = self._known.get(name)
        if known is None or name in self.changed:
            return
        version = version_of(response)
        if version is not None and version not in known:
            self.changed[name] = version
            log.warning("the provider changed %s: it answers as %.200s", name, version)

    @property
    def trouble(self) -> str | None:
        """What changed, in words."""
        for name, version in self.changed.items():
            return f"{name} answers as {version[:200]}, which the calibration did not see."
        return None
