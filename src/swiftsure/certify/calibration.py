"""`calibrate`: makes a policy from a record in one call."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from numpy.typing import ArrayLike

from swiftsure._lib import checks
from swiftsure.certify.anytime.calibration import GrowingCalibration
from swiftsure.certify.certificate import (
    curves_fingerprint,
    make_policy,
    wanted_risks,
    within_costs,
)
from swiftsure.certify.control import Control, ControlResult, joint
from swiftsure.certify.labels import Labeller, label_along, shortest
from swiftsure.certify.policy import Metadata, Policy
from swiftsure.curves.curve import Average, RiskCurve
from swiftsure.curves.paths import Path, PathLike, exit_candidates
from swiftsure.curves.pilots import pilot_size
from swiftsure.curves.risks import RISKS, Risk
from swiftsure.records import ExitRecord, ShardedRecord, ThresholdRecord
from swiftsure.records.checks import choose, weights_by_slice
from swiftsure.records.exit_record import Missing
from swiftsure.records.labels import MissingLabelsError

__all__ = ["calibrate", "curve_of", "set_aside"]

DELTA = 0.1
"""The failure probability if none is given."""


def calibrate(
    record: ExitRecord | ThresholdRecord | ShardedRecord | RiskCurve,
    *,
    epsilon: float | None = None,
    risk: str | None = None,
    loss: str | None = None,
    risks: Sequence[Risk] | None = None,
    control: str | Control = "ucb",
    bound: str = "auto",
    delta: float = DELTA,
    path: PathLike = None,
    split: float | None = None,
    seed: int | None = None,
    score: str | None = None,
    pool: int | None = None,
    missing: Missing = "raise",
    labeller: Labeller | None = None,
    budget: int | None = None,
    strict: bool = False,
    min_exit: int = 0,
    average: Average | None = None,
    max_group_size: int | None = None,
    above: float | None = None,
    worst: float | None = None,
    max_costs: Mapping[str, float] | None = None,
    weights: ArrayLike | Mapping[str, float] | None = None,
    max_weight: float | None = None,
    estimated_weights: bool = False,
    cost: str | None = None,
    metadata: Metadata | Mapping[str, str] | None = None,
    **options: Any,
) -> Policy:
    """Find and certify the fastest setting whose risk is at most ε.

    **Guarantee**: for `control="ucb"` and `"ltt"`, the risk of the policy on new samples is at most
    ε with probability at least 1 − δ over the draw of the calibration record; for `"crc"`, its mean
    over that draw is at most ε. Both hold provided that calibration and new samples are independent
    draws of one distribution, and that record, path, losses, ε, δ, control, bound and seed were
    fixed before the calibration losses were seen. Running this again with other arguments until a
    result pleases voids the guarantee.

    Parameters
    ----------
    record : ExitRecord, ThresholdRecord, ShardedRecord or RiskCurve
        The calibration samples; a `ShardedRecord` may hold more of them than fit into memory. A
        curve does not record its score, exits and model, so a policy
        made from one cannot be checked against a model, and the runtimes refuse it.
    epsilon : float
        The largest risk allowed; required, unless `risks` are given.
    risk, loss
        The risk to control, as in `record.curve`; by default "gap", or the curve's own. You may
        omit `loss` if the record has just one.
    risks : sequence of Risk, optional
        Several risks to control at once, instead of `epsilon`, `risk` and `loss`.
    control : {"ucb", "ltt", "crc", "empirical"} or Control
    bound : str
        Among `swiftsure.bounds.BOUNDS`, or "auto".
    delta : float
        Failure probability; "crc" and "empirical" have none.
    path, score, missing, strict, min_exit
        As in `ExitRecord.curve`.
    split : int or float, optional
        Number or share of the record's samples (or groups) to set aside, at random, as a pilot on
        which the path is learned (`Path.pareto`); the others calibrate. For records of several
        dials. The certificate says how many samples, or groups, went where.
    labeller : callable, optional
        (ids of samples, (m,)) -> their labels, (m,), as in `ExitRecord.with_labels`, or a mapping
        of their losses against the labels, (m, n_exits), by name. It is asked for the labels that
        the next setting lacks, only as the walk goes on. The walk stops at the first setting for
        which it gives no label (None, or a negative number; NaN for a loss).
    budget : int, optional
        The largest number of labels to ask the labeller for.
    average, max_group_size
        For records with groups, as in `ExitRecord.curve`: whether the risk is the mean of the
        group means ("group", the default), or the mean over samples, for groups of at most
        `max_group_size` samples ("sample").
    above : float, optional
        Bound the probability that the loss is above this, instead of its mean.
    worst : float, optional
        Bound the mean loss of this share of the samples, the worst, instead of the mean of all.
    max_costs : mapping, optional
        Largest mean cost by name, promised together with the risk: each has half of δ.
    weights : (n,) or mapping of slices to weights, optional
        Ratio of the densities of production and calibration samples: the promise is about
        production.
    max_weight : float, optional
        The largest weight that can occur, declared before the data are seen.
    estimated_weights : bool
        Whether the weights were estimated, which the certificate then states as an assumption.
    cost : str, optional
        The cost that must not exceed the full model's: if the certified setting needs more of it,
        the policy runs the full model, and says so. By default the price of a cascade (the first of
        the record's `full_costs` besides FLOPs and seconds); else a setting must save at least one
        of the record's costs. This choice is by costs alone, and both settings keep the promise.
        With `split` it is also the cost that the path saves: by default FLOPs, or the first.
    seed : int, optional
        Fixes the order of the samples for betting bounds. By default the record's own seed, drawn
        at random when the record was made and saved in its file, so that calibrating again gives
        the same policy. With a seed given here, the promise needs samples in random order, or a
        seed that was itself drawn at random, once. Never choose among seeds.
    pool : int, optional
        Size of the finite pool that the samples were drawn from without replacement.
    metadata : Metadata or mapping, optional
        `name`, `author` and `notes` of the policy; the date and the library's version are added.
    **options
        Other options of the control (`zero_bounded`, `monotone`, `method`, `correction`, …).

    Returns
    -------
    policy : Policy
        With `threshold=None` if nothing faster than the full model was certified.

    Examples
    --------
    >>> import numpy as np
    >>> from swiftsure.study.simulate import Population
    >>> sample = Population().sample(1000, seed=0)
    >>> record = ExitRecord.from_logits(sample.logits, sample.labels)
    >>> policy = calibrate(record, loss="zero_one", epsilon=0.05)
    >>> policy.threshold is not None
    True
    """
    if isinstance(control, Control) and (bound != "auto" or options):
        raise ValueError("`bound` and other options are the Control's own; leave them out here.")
    rule = control if isinstance(control, Control) else _control(control, bound, options)
    _refuse_unused(rule, delta)
    wanted = wanted_risks(epsilon, risk, loss, risks, above, worst)
    if isinstance(record, ExitRecord | ShardedRecord):
        known = record.first if isinstance(record, ShardedRecord) else record
        score = choose("score", score, known.confidences, preferred="top1")
        exits: dict[str, Any] = {"missing": missing, "strict": strict, "min_exit": min_exit}
    elif strict or min_exit or missing != "raise":
        raise ValueError("`strict`, `min_exit` and `missing` are for an ExitRecord.")
    else:
        exits = {}
    counted: dict[str, Any] = {"average": average, "max_group_size": max_group_size}
    alone = {"path": path, "pool": pool, "labeller": labeller, "weights": weights}
    learning = {"score": score, **exits, **counted}
    record, path = _split(record, split, seed, wanted, cost, alone, learning)
    weigh = _weighting(record, weights, max_weight, estimated_weights)
    share = delta if max_costs is None else _half(delta, pool, labeller)

    def prepared(curves: list[RiskCurve]) -> list[RiskCurve]:
        pairs = zip(curves, wanted, strict=True)
        return [weigh(curve.transformed(each.above, each.worst)) for curve, each in pairs]

    def run(curves: list[RiskCurve]) -> list[ControlResult]:
        pairs = zip(curves, wanted, strict=True)
        return [rule.run(curve, each.epsilon, share, seed, pool) for curve, each in pairs]

    def walk(curves: list[RiskCurve]) -> int:
        return joint(rule, curves, run(prepared(curves))).index or 0

    if labeller is not None:
        exits["missing"] = "stop"
        path = _fixed_path(record, wanted, score, path)
        options = {"strict": strict, "min_exit": min_exit, "score": score, **counted}
        record = label_along(record, wanted, path, options, walk, labeller, budget)  # type: ignore[arg-type]
    elif budget is not None:
        raise ValueError("`budget` is the number of labels to ask a `labeller` for; give both.")
    if isinstance(record, ExitRecord | ThresholdRecord | ShardedRecord):
        curves = shortest(
            [record.curve(r.risk, r.loss, score, path, **exits, **counted) for r in wanted]
        )
    else:
        curves = [curve_of(record, risk, loss, score, path, average, max_group_size)]
        record.refuse_own({"risks": risks})
    curves = prepared(curves)
    with ThreadPoolExecutor(1) as aside:  # hashing a large record takes as long as testing it
        data = aside.submit(curves_fingerprint, curves)
        results = run(curves)
    if isinstance(record, ThresholdRecord):
        score = None  # if known, it is in the record's settings
    chosen = joint(rule, curves, results)
    if max_costs is not None:
        order = curves[0].order.replaced_by(seed)
        chosen = within_costs(chosen, curves[0], max_costs, delta, order)
        # The costs are tested in an order, whatever tests the risk.
        shown = [dict.fromkeys((*each.assumptions, order.condition())) for each in results]
        results = [
            replace(
                each,
                delta=delta,
                seed=order.seed,
                seed_drawn=order.drawn,
                assumptions=tuple(conditions),
            )
            for each, conditions in zip(results, shown, strict=True)
        ]
    return make_policy(
        record,
        rule,
        curves,
        results,
        chosen,
        max_costs=max_costs,
        cost=cost,
        data=data.result(),
        score=score,
        pool=pool,
        metadata=metadata,
    )


def _fixed_path(record: Any, wanted: list[Risk], score: str | None, path: PathLike) -> Path:
    """Return the path of a walk that asks for labels; raise if there can be none."""
    if not isinstance(record, ExitRecord):
        raise ValueError("`labeller` is for an ExitRecord, in memory.")
    if any(RISKS[each.risk].selective for each in wanted):
        raise ValueError("`labeller` does not go with the risk of the samples that exit.")
    return Path.of(path, record.confidences[str(score)])


def _split(
    record: Any,
    split: float | None,
    seed: int | None,
    wanted: list[Risk],
    cost: str | None,
    alone: Mapping[str, Any],
    options: dict[str, Any],
) -> tuple[Any, PathLike]:
    """Return what `set_aside` returns; without a split, the record and the path given."""
    if split is None:
        return record, alone["path"]
    for name, value in alone.items():
        if value is not None:
            raise ValueError(f"`split` does not go with `{name}`.")
    return set_aside(record, split, seed, wanted, cost, options)


def set_aside(
    record: Any,
    split: float,
    seed: int | None,
    wanted: list[Risk],
    cost: str | None,
    options: dict[str, Any],
) -> tuple[Any, Path]:
    """Return the samples that calibrate, and the path learned on the others.

    The others are drawn by the record's seed, or by `seed`, so a second call repeats the first.
    """
    if not isinstance(record, ExitRecord | ThresholdRecord):
        raise ValueError(
            f"`split` needs an ExitRecord or a ThresholdRecord, but got {type(record).__name__}."
        )
    size = pilot_size(split, record.n_units, record.unit)
    pilot, rest = record.split(size, seed=record.order.replaced_by(seed))
    return rest, _learned(pilot, wanted, cost, options)


def _learned(pilot: Any, wanted: list[Risk], cost: str | None, options: dict[str, Any]) -> Path:
    """Return the path learned on a pilot, for all risks at once."""
    if isinstance(pilot, ExitRecord):
        options = options | {"path": exit_candidates(pilot, options["score"], None)}
    curves = [
        pilot.curve(each.risk, each.loss, **options).transformed(each.above, each.worst)
        for each in wanted
    ]
    return Path.front(curves, [each.epsilon for each in wanted], pilot, cost)


def _half(delta: float, pool: int | None, labeller: Labeller | None) -> float:
    """Return the risk's share of δ where costs are promised too; raise if they cannot be."""
    if pool is not None or labeller is not None:
        raise ValueError("`max_costs` does not go with a pool or a labeller.")
    return 0.5 * delta


def _weighting(
    record: Any,
    weights: ArrayLike | Mapping[str, float] | None,
    max_weight: float | None,
    estimated: bool,
) -> Callable[[RiskCurve], RiskCurve]:
    """Return a function that weights a curve's losses, if there are weights."""
    if isinstance(weights, Mapping):
        weights = weights_by_slice(record, weights)
    if (weights is None) != (max_weight is None):
        raise ValueError("`weights` and `max_weight` go together.")
    if weights is None or max_weight is None:
        if estimated:
            raise ValueError("`estimated_weights` says something about `weights`; give them too.")
        return lambda curve: curve
    return lambda curve: curve.weighted(weights, max_weight, estimated)


def curve_of(
    record: ExitRecord | ThresholdRecord | ShardedRecord | RiskCurve,
    risk: str | None,
    loss: str | None,
    score: str | None = None,
    path: PathLike = None,
    average: Average | None = None,
    max_group_size: int | None = None,
) -> RiskCurve:
    """Return a record's curve; a RiskCurve is returned as it is, with a name if it has none."""
    options: dict[str, Any] = {"average": average, "max_group_size": max_group_size}
    if isinstance(record, ExitRecord | ThresholdRecord | ShardedRecord):
        try:
            return record.curve(risk or "gap", loss, score, path, **options)
        except MissingLabelsError as error:  # callers have no `missing`, but take a curve
            lacking = str(error).partition(" missing label")[0]
            raise ValueError(
                f"{lacking} missing label(s) matter: `record.needs_label(loss={loss!r})` lists the"
                ' samples. Label them, or pass `record.curve(..., missing="worst")` in place of the'
                " record, which assumes the worst loss for them."
            ) from None
    if not isinstance(record, RiskCurve):
        raise TypeError(
            "`record` must be an ExitRecord, a ThresholdRecord or a RiskCurve, but got"
            f" {type(record).__name__}."
        )
    record.refuse_own({"score": score, "path": path, **options})
    return record.confirmed(risk, loss)


calibrate.start = GrowingCalibration  # type: ignore[attr-defined]
"""`calibrate.start(...)` starts a calibration that grows."""


def _control(name: str, bound: str, options: dict[str, Any]) -> Control:
    known = [field for field in Control.__dataclass_fields__ if field not in ("name", "bound")]
    arguments = [each for each in inspect.signature(calibrate).parameters if each != "options"]
    for option in options:
        checks.choice("options", option, [*known, *arguments])
    return Control(name, bound, **options)


def _refuse_unused(rule: Control, delta: float) -> None:
    """Raise if δ or a bound is given that the control does not use."""
    if rule.guarantee != "probability" and delta != DELTA:
        raise ValueError(
            f"`delta` is not used by {rule.label}, which makes no promise with a probability: leave"
            ' it out, or use control="ucb" or "ltt".'
        )
    if rule.bound != "auto" and not rule.uses_bound:
        raise ValueError(
            f"`bound` is not used by {rule.name}: leave it out, or use "
            + ('method="ucb".' if rule.name == "crc" else 'control="ucb" or "ltt".')
        )
