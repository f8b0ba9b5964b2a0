"""`calibrate_best`: the cheapest of several candidates, chosen so that its promise still holds.

Trying several records or scores and keeping the best voids a promise: among k candidates whose risk
is just above ε, one passes by luck with probability up to k δ. Either the candidates are compared
on pilot samples that calibrate nothing, or each is tested at δ / k, and all promises hold at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from swiftsure._lib import checks
from swiftsure.certify.calibration import DELTA, Ask, Calibration
from swiftsure.certify.certificate import Selection
from swiftsure.certify.control import Control
from swiftsure.certify.policy import Policy
from swiftsure.certify.promise import Promise
from swiftsure.curves.costs import default_cost
from swiftsure.records import ExitRecord, ThresholdRecord
from swiftsure.scores import LearnedScore

__all__ = ["calibrate_best", "with_selection"]

Score = str | LearnedScore
Candidate = tuple[ExitRecord | ThresholdRecord, Score | None]


def calibrate_best(
    candidates: Any,
    request: Promise | Calibration,
    *,
    split: int | float | None = None,
    correction: Literal["bonferroni"] | None = None,
) -> Policy:
    """Calibrate the candidate that costs least: among records (pairs of models) or scores.

    **Guarantee**: the risk of the policy on new samples is at most ε with probability at least
    1 − δ over the draw of all samples, although it was chosen among several. The risk is relative
    to the last model of the chosen candidate.

    Parameters
    ----------
    candidates : records, or a mapping of names to records
        A record with several scores is one candidate for each, unless the request names one;
        (record, score) names one too.
    request : Promise or Calibration
        What is promised, and how; its `cost` is compared, by default the one that `policy.evaluate`
        reports. Costs may be compared on any samples. The control must promise with a probability.
    split : int or fraction, optional
        Compare the candidates on this many pilot samples, drawn at random by the first record's
        own seed, and calibrate the best on the others at δ. All records must be of the same
        samples (ids).
    correction : "bonferroni", optional
        Instead of a split: calibrate every candidate on all samples at δ / k, and take the best.

    Returns
    -------
    policy : Policy
        `policy.certificate.selection` says how it was chosen, among what; `policy.calibration` is
        the request that was run on the chosen candidate.

    Examples
    --------
    >>> from swiftsure.study.simulate import Population
    >>> sample = Population().sample(1500, seed=0)
    >>> scores = ["top1", "entropy"]
    >>> record = ExitRecord.from_logits(sample.logits, sample.labels, scores)
    >>> policy = calibrate_best(record, Promise("zero_one", epsilon=0.05), split=0.3)
    >>> policy.certificate.selection.method, policy.certificate.samples.n
    ('pilot', 1050)
    """
    if (split is None) == (correction is None):
        raise ValueError("`split` or `correction` must be given, and not both.")
    if correction is not None:
        checks.choice("correction", correction, ["bonferroni"])
    request = request if isinstance(request, Calibration) else Calibration(request)  # type: ignore[arg-type]
    if request.control.guarantee != "probability":
        raise ValueError(
            "`control` must be ucb or ltt for several candidates: only the failure probabilities of"
            f" their tests add up, but got {request.control.label}."
        )
    missing = request.missing
    if isinstance(missing, Ask) and split is not None:
        raise ValueError(
            "`missing=Ask(...)` needs correction='bonferroni': candidates are compared on a pilot"
            " by their losses there, so the pilot must have labels."
        )
    if any(each.within == "each slice" for each in request.risks):
        raise ValueError(
            "`within='each slice'` gives a policy of slices, which one system runs: choose among"
            " the systems of each slice, on its own samples and with its share of δ."
        )
    found = _named(candidates, request.rule.score)
    cost = _cost(found, request.cost)
    request = replace(request, cost=cost)
    if split is None:
        share = replace(request, delta=request.delta / len(found))
        left = missing.shared() if isinstance(missing, Ask) else lambda: missing
        made = {
            name: _calibrated(candidate, replace(share, missing=left()))
            for name, candidate in found.items()
        }
        best = _cheapest(made, cost)
        selection = Selection(method="bonferroni", candidates=tuple(found), chosen=best, cost=cost)
        return with_selection(made[best], selection, request.delta)
    size = _pilot(found, split)
    order = next(iter(found.values()))[0].order
    parts = {name: record.split(size, order) for name, (record, _) in found.items()}
    compared = _measured(request, [part for part, _ in parts.values()])
    tried = {
        name: _calibrated((parts[name][0], score), compared) for name, (_, score) in found.items()
    }
    best = _cheapest(tried, cost)
    selection = Selection(
        method="pilot",
        candidates=tuple(found),
        chosen=best,
        cost=cost,
        n_pilot=size,
        unit=next(iter(found.values()))[0].unit,
    )
    made_best = _calibrated((parts[best][1], found[best][1]), request)
    return with_selection(made_best, selection, request.delta)


def _measured(request: Calibration, pilots: Sequence[Any]) -> Calibration:
    """Return the request that compares candidates on pilots, where nothing is certified.

    It looks at measured risks alone, except where only a test can choose a setting.
    """
    tested = any(each.among == "exits" for each in request.risks) or request.missing == "stop"
    tested |= any(each.sampling.population is not None for each in pilots)
    if tested or getattr(request.path, "branches", None) is not None:
        return request
    risks = tuple(replace(each, within=None) for each in request.risks)
    return replace(request, promises=risks, delta=DELTA, control=Control("empirical"), bound="auto")


def _calibrated(candidate: Candidate, request: Calibration) -> Policy:
    record, score = candidate
    policy: Any = replace(request, rule=replace(request.rule, score=score)).run(record)
    found: Policy = policy
    return found


def with_selection(policy: Policy, selection: Selection, delta: float) -> Policy:
    """Return the policy with what chose it; δ is that of the whole choice."""
    changes = {"selection": selection, "delta": delta}
    certificate = policy.certificate.model_copy(update=changes)
    return policy.model_copy(update={"certificate": certificate})


def _cheapest(policies: Mapping[str, Policy], cost: str) -> str:
    """Return the name of the policy with the least mean cost; the first of several."""
    return min(policies, key=lambda name: policies[name].certificate.costs.means[cost][1])


def _named(candidates: Any, score: Score | None) -> dict[str, Candidate]:
    """Return the candidates by name, one for each record and score."""
    if isinstance(candidates, ExitRecord | ThresholdRecord):
        candidates = [candidates]
    given = (
        candidates.items()
        if isinstance(candidates, Mapping)
        else ((str(k + 1), each) for k, each in enumerate(candidates))
    )
    found: dict[str, Candidate] = {}
    for name, each in given:
        record, own = each if isinstance(each, tuple) else (each, score)
        if isinstance(record, ThresholdRecord):
            found[str(name)] = (record, None)
            continue
        if not isinstance(record, ExitRecord):
            raise TypeError(
                "`candidates` must be records, or pairs (record, score), but got"
                f" {type(record).__name__}."
            )
        scores: list[Score] = list(record.confidences) if own is None else [own]
        for each_score in scores:
            if isinstance(each_score, str):
                checks.choice("score", each_score, record.confidences)
            title = str(name) if len(scores) == 1 else f"{name} by {each_score}"
            if len(scores) > 1 and not isinstance(candidates, Mapping) and len(candidates) == 1:
                title = str(each_score)
            found[title] = (record, each_score)
    if not found:
        raise ValueError("`candidates` must not be empty.")
    return found


def _cost(found: Mapping[str, Candidate], cost: str | None) -> str:
    """Return the cost to compare, which every record must have."""
    records = [record for record, _ in found.values()]
    shared = [k for k in records[0].costs if all(k in record.costs for record in records)]
    name = default_cost(shared, getattr(records[0], "full_costs", {}), cost)
    same_exits = len({getattr(record, "n_exits", None) for record in records}) == 1
    if name is None or (name == "exit" and cost is None and not same_exits):
        raise ValueError(
            "`candidates` must share a cost to compare, besides the exit number of networks with"
            f" different exits, but share: {', '.join(shared) or 'none'}."
        )
    return name


def _pilot(found: Mapping[str, Candidate], split: int | float) -> int:
    """Return how many pilot units there are; raise if the records are not of the same samples."""
    records: Sequence[Any] = [record for record, _ in found.values()]
    first = records[0]
    if any(not np.array_equal(first.ids, record.ids) for record in records):
        raise ValueError(
            "`split` needs records of the same samples, with the same ids in the same order: a"
            " pilot sample of one must not calibrate another. Use correction='bonferroni'."
        )
    same = (lambda a, b: a is b is None) if first.groups is None else np.array_equal
    if not all(same(first.groups, record.groups) for record in records):
        raise ValueError("`split` needs records whose samples are in the same groups.")
    size: Any = split
    if isinstance(split, float) and 0 < split < 1:
        size = round(split * first.n_units)
    if not 0 < checks.count("split", size) < first.n_units:
        raise ValueError(
            f"`split` must leave {first.unit} to calibrate on: below {first.n_units:,}."
        )
    return int(size)
