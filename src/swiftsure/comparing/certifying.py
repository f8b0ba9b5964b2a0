"""`compare`: certify the cheapest of several models by their scores on the same samples."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from swiftsure._lib import checks
from swiftsure.certify.calibration import Calibration
from swiftsure.certify.control import Control
from swiftsure.certify.policy import Policy
from swiftsure.certify.promise import Promise
from swiftsure.comparing.columns import Columns
from swiftsure.losses import LossRange

__all__ = ["compare"]


def compare(
    columns: Any,
    request: Promise | Calibration,
    *,
    full: str | None = None,
    costs: Mapping[str, float] | None = None,
    values: LossRange | tuple[float, float] | None = None,
    correction: Literal["fixed_sequence", "bonferroni"] = "fixed_sequence",
    seed: int | None = None,
) -> Policy:
    """Certify the cheapest of several models, by their scores on the same samples.

    The models are a full one and its variants: quantised, distilled, cached, re-prompted.

    **Guarantee**: with probability at least 1 − δ over the draw of the samples, the mean score of
    the chosen model on new samples is at most ε below the full model's (or what else is promised).
    Models, costs, order, ε and δ must be fixed before the scores are seen. In a fixed sequence the
    models are tested one after the other at δ, from the dearest to the cheapest, and the first
    failure ends the walk; with "bonferroni" each of k is tested at δ / k, and one bad model in
    between stops nothing.

    Parameters
    ----------
    columns : Columns, data frame, Arrow table or mapping
        The score of each sample under each model, higher is better; see `Columns`.
    request : Promise or Calibration
        Its loss names what the scores measure: `Promise("f1", epsilon=0.05)`.
    full, costs, values
        As in `Columns.record`. Without costs, name the models from the dearest to the cheapest.
    correction : {"fixed_sequence", "bonferroni"}
        Use "bonferroni" if you do not expect cheaper models to be worse.
    seed : int, optional
        Fixes the order in which samples are tested; drawn at random by default.

    Returns
    -------
    policy : Policy
        `policy.settings["model"]` is the chosen model; the full one if no other was certified.

    Examples
    --------
    >>> import numpy as np
    >>> full = np.random.default_rng(0).random(500)
    >>> columns = {"full": full, "8 bits": full, "2 bits": full / 4}
    >>> bits = {"full": 16, "8 bits": 8, "2 bits": 2}
    >>> compare(columns, Promise("f1", epsilon=0.05), costs=bits).settings["model"]
    '8 bits'
    """
    request = request if isinstance(request, Calibration) else Calibration(request)  # type: ignore[arg-type]
    checks.choice("correction", correction, ["fixed_sequence", "bonferroni"])
    if correction == "bonferroni":
        if request.control.name not in ("ucb", "ltt"):
            raise ValueError(
                "`control` must be ucb or ltt for correction='bonferroni', but got"
                f" {request.control.label}."
            )
        control = Control("ltt", request.bound, request.control.zero_bounded, correction)
        request = replace(request, control=control)
    measures = {each.loss for each in request.risks}
    if len(measures) != 1 or None in measures:
        raise ValueError(
            "`request` must name what the scores measure, the same in every promise, like"
            " Promise('f1', epsilon=0.05)."
        )
    measure = str(measures.pop())
    record = Columns.of(columns).record(measure, full=full, costs=costs, values=values, order=seed)
    (loss,) = record.losses
    promises = tuple(
        replace(each, loss=loss) if isinstance(each, Promise) else each for each in request.promises
    )
    policy: Any = replace(request, promises=promises).run(record)
    found: Policy = policy
    return found
