"""What `generate` prepares from its options, kept for the next call with the same ones.

Preparing a generation takes `generate` 1 to 2 ms, as long as a small model writes ten tokens.
"""

from collections.abc import Hashable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Plan", "Plans"]

INPUTS = ({"input_ids", "attention_mask"}, {"encoder_outputs", "attention_mask"})
"""Tensors that a generation may be given, if its plan is to be kept."""
LARGEST = 64
"""Number of plans that are kept."""


@dataclass(frozen=True)
class Plan:
    """What a generation depends on besides its inputs."""

    start: Tensor
    """(1, positions) before the first answer token."""
    tokens: int
    """Largest number of answer tokens."""
    ends: frozenset[int]
    barred: int
    """Number of answer tokens before which no end token is picked."""
    pad: int


class Plans:
    """Plans by the options of `generate`, for a model with an encoder.

    Only for options that are numbers, and as long as the model's own options stay the same.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._kept: dict[Hashable, Plan] = {}
        self._config: dict[str, Any] = {}

    def get(self, options: dict[str, Any]) -> Plan | None:
        """Return the plan for these options; None if `generate` has to prepare."""
        key = self._key(options)
        if key is None or self._config != vars(self._model.generation_config):
            return None
        return self._kept.get(key)

    def keep(self, options: dict[str, Any], plan: Plan) -> None:
        """Keep a plan if it depends on nothing but these options."""
        key = self._key(options)
        if key is None or plan.start.shape[1] != 1:
            return
        now = vars(self._model.generation_config)
        if self._config != now or len(self._kept) >= LARGEST:
            self._kept, self._config = {}, deepcopy(now)
        self._kept[key] = plan

    def _key(self, options: dict[str, Any]) -> Hashable | None:
        if not self._model.config.is_encoder_decoder:
            return None
        device = self._model.device
        key: list[tuple[str, Hashable]] = []
        tensors: set[str] = set()
        for name, value in sorted(options.items()):
            given = value[0] if name == "encoder_outputs" else value
            if isinstance(given, Tensor) and given.device == device:
                tensors.add(name)
            elif isinstance(value, int | float | None):
                key.append((name, value))
            elif isinstance(value, list | tuple) and all(isinstance(each, int) for each in value):
                key.append((name, tuple(value)))
            else:
                return None
        return (device, *key) if tensors in INPUTS else None
