"""Selection: runs a request on a record, from its curves to the setting that keeps every promise.

Promises about risks share one walk along the path, which stops where the first of them fails. Those
about the samples that exit early share another, and mean costs a third; walks share δ equally.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib import checks
from swiftsure.certify import bounds
from swiftsure.certify.building import Findings, curves_fingerprint, make_policy
from swiftsure.certify.calibration import Ask, Calibration
from swiftsure.certify.control import ControlResult
from swiftsure.certify.labels import label_along, shortest
from swiftsure.certify.policy import Metadata, Policy
from swiftsure.certify.promise import Promise, slice_rows
from swiftsure.certify.slices import SlicedPolicy, sliced_policies
from swiftsure.certify.together import certified_together
from swiftsure.curves import transforms
from swiftsure.curves.conditions import Condition
from swiftsure.curves.curve import RiskCurve
from swiftsure.curves.paths import BREAKPOINTS, Path, exit_candidates
from swiftsure.curves.pilots import PilotPath, pilot_size
from swiftsure.curves.risks import RISKS
from swiftsure.curves.sample_order import SampleOrder
from swiftsure.losses import LossRange
from swiftsure.records import ExitRecord, ShardedRecord, ThresholdRecord
from swiftsure.records.checks import chosen_loss
from swiftsure.records.routing import ROUTER

__all__ = [
    "Cell",
    "cells",
    "fastest",
    "overall",
    "prepared",
    "refuse_own",
    "run",
    "small_slices",
    "walk_delta",
    "within_costs",
]

Records = ExitRecord | ThresholdRecord | ShardedRecord
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Cell:
    """What is tested of one promise: the curve of all samples, or of those of one slice."""

    promise: Promise
    curve: RiskCurve
    slice_name: str | None = None
    rows: NDArray[np.int64] | None = None


def run(
    request: Calibration, record: Any, metadata: Metadata | Mapping[str, str] | None = None
) -> Policy | SlicedPolicy:
    """Return the policy that a request certifies on a record."""
    if not isinstance(record, Records | RiskCurve):
        raise TypeError(
            "`record` must be an ExitRecord, a ThresholdRecord or a RiskCurve, but got"
            f" {type(record).__name__}."
        )
    _refuse_missing_theorems(request, record)
    within = {each.within for each in request.risks}
    if "each slice" in within:
        if within != {"each slice"}:
            raise ValueError(
                "`within='each slice'` gives each slice a setting of its own, so every Promise must"
                " ask for it."
            )
        return sliced_policies(request, record, metadata)
    asked = request
    record, request = prepared(request, record)
    tested = cells(request, record)
    whole = overall(request, record, tested)
    small = small_slices(request, tested)
    share = walk_delta(request)
    population = None if isinstance(record, RiskCurve) else record.sampling.population
    with ThreadPoolExecutor(1) as aside:  # hashing a large record takes as long as testing it
        data = aside.submit(curves_fingerprint, whole)
        results = [
            request.control.run(each.curve, each.promise.epsilon, share, pool=population)
            for each in tested
        ]
    mask = certified_together(
        request.control, [each.curve for each in tested], results, share, population
    )
    draws: Condition | None = None
    order: SampleOrder | None = None
    if request.limits:
        mask &= within_costs(request, record, len(mask), share)
        # Costs are bounded over all samples together, whatever holds in slices.
        draws, order = whole[0].units.draws, whole[0].order
    if small:
        mask[:] = False
    index = fastest(tested[0].curve, mask)
    chosen = replace(
        results[0],
        index=index,
        threshold=None if index is None else whole[0].threshold_at(index),
        delta=request.delta if results[0].delta is not None else None,
        n=whole[0].n,
    )
    found = Findings(
        whole,
        _by_promise(request, tested, results, draws, order),
        chosen,
        data=data.result(),
        population=population,
        slices=_slice_sizes(tested),
        small_slices=small,
    )
    return make_policy(asked, record, found, metadata)


def prepared(request: Calibration, record: Any) -> tuple[Any, Calibration]:
    """Return the samples that calibrate, and the request with a path that needs no pilot.

    A pilot is set aside, and its path learned; labels are asked for.
    """
    _refuse_missing_theorems(request, record)
    if isinstance(request.path, PilotPath):
        record, request = _with_learned_path(request, record)
    if isinstance(request.missing, Ask):
        record, request = _labelled(request, record)
    return record, request


def cells(request: Calibration, record: Any) -> list[Cell]:
    """Return what the promises test, all cut where the first of them lacks a label."""
    found = []
    for promise in request.risks:
        parts: list[tuple[str | None, Any]] = [(None, None)]
        if promise.within == "slices":
            parts = [*slice_rows(record).items()]
        for name, rows in parts:
            curve = _promised(request, promise, record, rows)
            found.append(Cell(promise, curve, name, rows))
    curves = shortest([each.curve for each in found])
    return [replace(each, curve=curve) for each, curve in zip(found, curves, strict=True)]


def _promised(
    request: Calibration, promise: Promise, record: Any, rows: NDArray[np.int64] | None
) -> RiskCurve:
    """Return the curve of a promise; where labels were asked for, as its test allows."""
    path: Any = request.path
    if not isinstance(request.missing, Ask):
        return promise.curve(record, request.rule, path, request.missing, rows)
    counted = promise.curve(record, request.rule, path, "worst", rows)
    if request.control.counts_missing(counted, record.sampling.population):
        return counted
    return promise.curve(record, request.rule, path, "stop", rows)


def overall(request: Calibration, record: Any, tested: list[Cell]) -> list[RiskCurve]:
    """Return one curve for each promise, of the samples of all slices together."""
    if all(each.slice_name is None for each in tested):
        return [each.curve for each in tested]
    plain = replace(
        request,
        promises=tuple(
            replace(each, within=None) if isinstance(each, Promise) else each
            for each in request.promises
        ),
    )
    return [each.curve for each in cells(plain, record)]


def walk_delta(request: Calibration) -> float:
    """Return the share of δ of each walk: δ divided by the number of walks."""
    walks = len({each.among for each in request.risks}) + bool(request.limits)
    return request.delta / walks


def _refuse_missing_theorems(request: Calibration, record: Any) -> None:
    """Raise for what no theorem here allows, and say which is missing."""
    breakpoints = request.path == BREAKPOINTS or request.path == "breakpoints"
    if breakpoints and any(each.within == "slices" for each in request.risks):
        raise ValueError(
            "`path` must be fixed beforehand for promises within slices: the breakpoints of one"
            " slice depend on the others' samples."
        )
    if isinstance(record, RiskCurve):
        rule, missing = request.rule, request.missing
        refuse_own(
            path=request.path,
            score=rule.score,
            strict=rule.strict or None,
            min_exit=rule.min_exit or None,
            missing=None if missing == "raise" else missing,
        )
        if request.limits:
            raise ValueError("A CostPromise needs a record; a RiskCurve has no largest cost.")
        return
    promises_probability = request.control.guarantee == "probability"
    if not promises_probability and (request.limits or any(e.within for e in request.risks)):
        raise ValueError(
            "`control` must be ucb, or ltt in fixed sequence, for slices and costs: of several"
            " slices or walks only the failure probabilities add up, not the means of their risks."
        )
    if ROUTER in getattr(record, "settings", {}) and any(
        each.among == "exits" for each in request.risks
    ):
        raise ValueError(
            "`among='exits'` would count inputs that the router sends to the full model as exits"
            " without loss. Promise the mean over all inputs, or calibrate without the router."
        )
    if record.sampling.population is not None:
        if isinstance(request.path, PilotPath):
            raise ValueError(
                "`Path.learn` cannot set a pilot aside from samples `drawn_from` a finite"
                " population: the others are draws of what the pilot left of it. Set it aside"
                " with `record.split`, learn a path on it with `Path.pareto`, and declare the rest"
                " `drawn_from` the population less the pilot: the promise is then about these."
            )
        restricted = any(
            each.among == "exits" or each.within or not each.reading.additive
            for each in request.risks
        )
        if restricted or record.sampling.weights is not None or request.limits:
            raise ValueError(
                "Samples `drawn_from` a finite population go with promises about the mean or a tail"
                " over all of it: there is no test here of a weighted or restricted mean, a worst"
                " share or a cost without replacement. Leave `drawn_from` out, and the promise is"
                " about the distribution instead."
            )


def refuse_own(**given: Any) -> None:
    """Raise if an argument is given that a RiskCurve already determines."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"`{name}` is the RiskCurve's own; leave it out.")


def _with_learned_path(request: Calibration, record: Any) -> tuple[Any, Calibration]:
    """Return the samples that calibrate, the request with the path that the others taught."""
    wish: Any = request.path
    if not isinstance(record, ExitRecord | ThresholdRecord):
        raise ValueError(
            f"`Path.learn` needs an ExitRecord or a ThresholdRecord, but got"
            f" {type(record).__name__}."
        )
    size = pilot_size(wish.share, record.n_units, record.unit)
    pilot, rest = record.split(size, seed=record.order)
    path: Path | None = None
    if isinstance(pilot, ExitRecord):
        path = exit_candidates(pilot, pilot.score_of(request.rule), None)
    missing = "raise" if isinstance(request.missing, Ask) else request.missing
    curves = [
        replace(each, within=None).curve(pilot, request.rule, path, missing)
        for each in request.risks
    ]
    levels = [each.epsilon for each in request.risks]
    front = Path.front(curves, levels, pilot, wish.cost or request.cost)
    return rest, replace(request, path=front)


def _labelled(request: Calibration, record: Any) -> tuple[Any, Calibration]:
    """Return the record with the labels that the walk asks for, and the request without asking."""
    ask: Any = request.missing
    if not isinstance(record, ExitRecord):
        raise ValueError("`missing=Ask(...)` is for an ExitRecord, in memory.")
    if ask.labeller is None:
        raise ValueError("`missing` must be Ask(labeller): a policy's file does not keep it.")
    route: Any = request.path
    path = Path.of(route, record.confidences_of(request.rule))
    request = replace(request, path=path)
    stopping = replace(request, missing="stop")
    share, population = walk_delta(request), record.sampling.population
    several_starts = any(each.among == "exits" for each in request.risks)

    def last_certified(labelled: ExitRecord) -> tuple[int, int, bool]:
        tested = cells(stopping, labelled)
        curves = [each.curve for each in tested]
        if several_starts or curves[0].cut_from is None:
            return curves[0].n_settings, curves[0].n_settings, curves[0].cut_from is None
        results = [
            request.control.run(each.curve, each.promise.epsilon, share, pool=population)
            for each in tested
        ]
        index = min(-1 if each.index is None else each.index for each in results)
        return curves[0].n_settings, max(index, 0) + 1, False

    record = record.with_labels([])
    losses = {
        chosen_loss(record, each.risk, each.loss)
        for each in request.risks
        if RISKS[each.risk].table == "losses"
    }
    labelled = label_along(
        record, sorted(losses), path, request.rule, last_certified, ask.labeller, ask.budget
    )
    return labelled, request


def small_slices(request: Calibration, tested: list[Cell]) -> dict[str, int]:
    """Return slices with too few samples to certify anything, and how many they need.

    It depends on the numbers of samples alone, never on their losses.
    """
    small = {}
    for each in tested:
        if each.slice_name is None:
            continue
        largest = LossRange(0, each.curve.loss_range.high)
        needed = bounds.minimum_samples(each.promise.epsilon, walk_delta(request), largest) or 0
        if each.curve.n < needed and each.curve.loss_range.low >= 0:
            small[each.slice_name] = needed
    return small


def within_costs(request: Calibration, record: Any, n_settings: int, delta: float) -> Mask:
    """Return the settings whose mean costs are certified, walking from the fast end.

    The first setting there whose mean cost is too high is certified with probability at most δ.
    Costs need no labels, so the walk begins at the end of the whole path.
    """
    first, star = request.risks[0], bounds.BOUNDS["star"]
    route: Any = request.path
    if isinstance(route, Path) and route.branches is not None:
        raise ValueError(
            "A CostPromise needs a path that is one sequence: branches have no fast end."
        )
    plain = replace(first, above=None, worst=None, among="all", within=None)
    tables = []
    for name, limit in request.limits.items():
        curve = plain.uncut(record, request.rule, route)
        most = _largest_cost(curve, name)
        level = checks.between("at_most", limit, 0.0, most) / most
        costs = record.sampling.applied(transforms.cost_curve(curve, name, most), record.groups)
        tables.append((costs, level))
    costs = tables[0][0]
    rows, one_by_one = costs.rows_in_order(costs.order.seed), np.arange(costs.n)
    k = costs.n_settings
    while k > 0 and all(
        star.passes(table.only(k - 1, rows), one_by_one, level, delta)[0] for table, level in tables
    ):
        k -= 1
    kept: Mask = np.arange(costs.n_settings)[:n_settings] >= k
    return kept


def _largest_cost(curve: RiskCurve, name: str) -> float:
    values = curve.costs[checks.choice("cost", name, curve.costs)]
    if values.ndim != 1:
        raise ValueError(
            f"A CostPromise needs a cost per exit or setting, but {name!r} differs between samples:"
            " its largest possible value is not known."
        )
    return float(values.max())


def fastest(curve: RiskCurve, mask: Mask) -> int | None:
    """Return the fastest of the certified settings: the last, or the cheapest on branches."""
    found = np.flatnonzero(mask)
    if not found.size:
        return None
    if curve.branches is None:
        return int(found[-1])
    cost = curve.default_cost()
    if cost is None:
        raise ValueError("`path` with branches needs costs, to choose among the branches.")
    costs = curve.mean_cost(cost)
    return int(min(found, key=lambda k: costs[k]))


def _by_promise(
    request: Calibration,
    tested: list[Cell],
    results: list[ControlResult],
    draws: Condition | None,
    order: SampleOrder | None,
) -> list[ControlResult]:
    """Return one result for each promise, with the conditions of all its slices.

    `draws` and `order` are those of the samples whose costs bets tested, if any were.
    """
    found = []
    unit = tested[0].curve.units.name
    more = () if draws is None or order is None else (draws, order.condition(unit))
    ordered: dict[str, Any] = (
        {} if order is None else {"seed": order.seed, "seed_drawn": order.drawn}
    )
    for promise in request.risks:
        own = [
            result for each, result in zip(tested, results, strict=True) if each.promise is promise
        ]
        stated = [condition for each in own for condition in each.conditions]
        sliced = promise.within is not None
        found.append(
            replace(
                own[0],
                delta=request.delta if own[0].delta is not None else None,
                conditions=tuple(dict.fromkeys([*stated, *more])),
                tested=None if sliced else own[0].tested,
                **ordered,
            )
        )
    return found


def _slice_sizes(tested: list[Cell]) -> dict[str, int]:
    return {each.slice_name: each.curve.n for each in tested if each.slice_name is not None}
