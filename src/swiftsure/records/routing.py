"""Records with a router in front: inputs that it sends straight to the full model.

A router is an exit before the others. Where it fires, the full model answers at once, so the loss
is the full model's and the models in between cost nothing.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure._lib import checks
from swiftsure.curves.paths import ROUTER
from swiftsure.curves.pilots import PilotSamples, learned_on

if TYPE_CHECKING:
    from swiftsure.records.exit_record import ExitRecord

__all__ = ["ROUTER", "routed"]


def routed(
    record: "ExitRecord",
    hopeless: ArrayLike,
    cost: Mapping[str, float | ArrayLike] | None = None,
    pilot: PilotSamples | None = None,
) -> "ExitRecord":
    """Return a record with a router before its first exit; see `ExitRecord.routed`."""
    if ROUTER in record.settings:
        raise ValueError("`record` must not have a router yet.")
    if pilot is not None:
        pilot.refuse(record, "router")
    level = checks.numbers("hopeless", hopeless, np.float32)
    checks.of_shape("hopeless", level, {"n": record.n})
    own = {name: np.asarray(value, np.float64) for name, value in (cost or {}).items()}
    for name in own:
        checks.choice("cost", name, record.costs)
    costs, alone = {}, dict(record.full_costs)
    for name, values in record.costs.items():
        if name == "exit":
            continue
        full = np.asarray(alone.setdefault(name, values[..., -1]), np.float64)
        columns = [full, *np.moveaxis(values, -1, 0)]
        summed = [own.get(name, 0.0) + column for column in columns]
        costs[name] = np.stack(np.broadcast_arrays(*summed), axis=-1)
    predictions = record.predictions
    return replace(
        record,
        confidences={k: np.column_stack([level, v]) for k, v in record.confidences.items()},
        losses={k: _answered_first(v) for k, v in record.losses.items()},
        inconsistencies={k: _answered_first(v) for k, v in record.inconsistencies.items()},
        costs=costs,
        full_costs=alone,
        features={},
        predictions=None if predictions is None else _answered_first(predictions),
        settings=learned_on({**record.settings, ROUTER: True}, "router", pilot),
    )


def _answered_first(values: NDArray[Any]) -> NDArray[Any]:
    """Return values per exit with the last exit's also first: it answers where the router fires."""
    return np.column_stack([values[:, -1], values])
