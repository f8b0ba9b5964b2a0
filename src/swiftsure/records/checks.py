"""Checks of the arrays of a record, made before anything is computed from them."""

import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure._lib import checks
from swiftsure.curves.checks import in_range
from swiftsure.curves.costs import price_of
from swiftsure.curves.risks import RISKS
from swiftsure.losses import LOSSES, LossRange

__all__ = [
    "COLDEST",
    "DTYPES",
    "HOTTEST",
    "check_dtype",
    "choose",
    "chosen_loss",
    "confidence_array",
    "declared_ranges",
    "full_cost_mapping",
    "gap_is_known_by_agreement",
    "id_array",
    "inconsistency_array",
    "label_array",
    "loss_array",
    "mapping_of_arrays",
    "replace_fields",
    "temperature_tuple",
]

Array = NDArray[Any]
Record = TypeVar("Record")
Ranges = Mapping[str, LossRange | tuple[float, float]]

DTYPES = ("bfloat16", "float16", "float32")
"""Inference dtypes by name."""

COLDEST, HOTTEST = 1e-30, 1e30
"""Range of temperatures; logits divided by one fit float64 with room to spare."""

FEWEST_TO_JUDGE = 30
"""Samples from which on losses are compared with what accuracies would be."""

ROUNDING = 1e-6
"""How far outside [0, 1] a confidence may be, due to rounding."""


def confidence_array(name: str, values: ArrayLike, shape: tuple[int, ...] | None) -> Array:
    """Return confidences as contiguous float32, clipped to [0, 1] if rounding exceeded it."""
    array = checks.numbers(name, values)
    axes = dict.fromkeys(("n", "n_exits - 1"))
    if shape is not None:
        axes = dict(zip(axes, shape, strict=True))
    checks.finite(name, checks.of_shape(name, array, axes))
    low, high = array.min(), array.max()
    if (low < 0 or high > 1) and low >= -ROUNDING and high <= 1 + ROUNDING:
        array = np.clip(array, 0.0, 1.0)
    return np.ascontiguousarray(checks.within(name, array, 0.0, 1.0), np.float32)


def loss_array(name: str, values: ArrayLike, axes: Mapping[str, int], declared: LossRange) -> Array:
    """Return losses, checked to be in their declared range; float32 and float64 are kept."""
    array = checks.numbers(name, values)
    if array.dtype not in (np.float32, np.float64):
        array = array.astype(np.float64)
    attribute, _, own = name.partition("[")
    place = "loss_ranges" if attribute == "losses" else "inconsistency_ranges"
    known = f"{place}={{{own.rstrip(']')}: (low, high)}}"
    hint = f" If the loss may be that large, declare its range: {known}."
    return in_range(name, _of_shape(name, array, axes), declared, hint)


def _of_shape(name: str, array: Array, axes: Mapping[str, int]) -> Array:
    """Check the shape of losses, with a hint if confidences include the last exit."""
    n, n_columns = axes.values()
    as_many = "n_exits" in axes and array.shape == (n, n_columns - 1)
    hint = " `confidences` have as many columns, but need none for the last exit." * as_many
    return checks.of_shape(name, array, axes, hint)


def loss_array_with_gaps(
    name: str,
    values: ArrayLike,
    axes: Mapping[str, int],
    declared: LossRange,
    inconsistencies: Array | None,
) -> Array:
    """Return losses; whole rows may be NaN (no label) if `inconsistencies` are given."""
    array = checks.numbers(name, values)
    missing = np.isnan(array) if array.dtype.kind == "f" else np.zeros(array.shape, bool)
    if not missing.any():
        return loss_array(name, array, axes, declared)
    if inconsistencies is None:
        row = int(np.argwhere(missing)[0, 0])
        raise ValueError(
            f"`{name}` holds NaN in row {row}. Labels may be missing only for prediction losses"
            " whose `inconsistencies` are given under the same name."
        )
    _of_shape(name, array, axes)
    partly = np.flatnonzero(missing.any(axis=1) & ~missing.all(axis=1))
    if partly.size:
        raise ValueError(f"`{name}` must be NaN in whole rows, but row {partly[0]} is so in part.")
    filled = loss_array(name, np.where(missing, declared.low, array), axes, declared)
    filled[missing] = np.nan
    return filled


def inconsistency_array(
    name: str, values: ArrayLike, axes: Mapping[str, int], declared: LossRange, full: int
) -> Array:
    """Return losses against the full model, checked to be 0 in its own column, `full`."""
    array = loss_array(name, values, axes, declared)
    if array[:, full].any():
        raise ValueError(
            f"`{name}` must be 0 in column {full}, the full model, but its largest value there is"
            f" {np.abs(array[:, full]).max():g}."
        )
    return array


def declared_ranges(record: Any) -> tuple[dict[str, LossRange], dict[str, LossRange]]:
    """Return the declared ranges of a record's losses and inconsistencies.

    Each is the range given, else that of the loss in `LOSSES` with this name, else (0, 1).
    """
    for name in ("losses", "inconsistencies", "costs", "loss_ranges", "inconsistency_ranges"):
        mapping_of_arrays(name, getattr(record, name))
    if not record.losses and not record.inconsistencies:
        raise ValueError(
            "`losses` or `inconsistencies` must be given: there is nothing to control."
        )

    def declared(given: Ranges, name: str) -> LossRange:
        if name in given:
            return LossRange.of(given[name])
        return LOSSES[name].range if name in LOSSES else LossRange(0, 1)

    either = {**record.loss_ranges, **record.inconsistency_ranges}
    return (
        {name: declared(record.loss_ranges, name) for name in record.losses},
        {name: declared(either, name) for name in record.inconsistencies},
    )


def replace_fields(record: Any, **values: Any) -> None:
    """Set fields of a frozen record to their checked values."""
    for name, value in values.items():
        object.__setattr__(record, name, value)


def warn_of_falling_costs(name: str, costs: Array) -> None:
    """Warn if costs look like those of single stages, not cumulative ones."""
    means = costs if costs.ndim == 1 else costs.mean(axis=0)  # costs per sample may be noisy
    if (np.diff(means) < 0).any():
        warnings.warn(
            f"costs['{name}'] fall from one exit to a later one, but the cost of an exit is that of"
            " all that ran up to it: add them up (numpy.cumsum).",
            stacklevel=4,
        )


def warn_of_accuracies(losses: Mapping[str, Array], full: int, fastest: int) -> None:
    """Warn if losses of 0 and 1 look like accuracies: high, and highest for the full model."""
    for name, values in losses.items():
        table = values[~np.isnan(values[:, full])]
        if len(table) < FEWEST_TO_JUDGE or not np.isin(table, (0, 1)).all():
            continue
        error, fast = table[:, full].mean(), table[:, fastest].mean()
        # Five standard errors, so that chance does not warn.
        if error > 0.5 and error - fast > 5 * np.sqrt(0.5 / len(table)):
            warnings.warn(
                f"losses['{name}'] are {error:.2g} on average for the full model and {fast:.2g} for"
                " the fastest exit or setting. A loss is 1 where the answer is wrong: if these are"
                " accuracies, pass 1 minus them. If not, the full model is much the worse one.",
                stacklevel=5,
            )


def warn_of_a_large_first_model(costs: Mapping[str, Array], full_costs: Any) -> None:
    """Warn if the first model of a cascade is dearer than the last one alone."""
    price = price_of(full_costs)
    if price is None:
        return
    first, alone = float(np.mean(costs[price][..., 0])), float(np.mean(full_costs[price]))
    if first > alone:
        warnings.warn(
            f"costs['{price}'] of the first model, {first:.3g}, are above those of the last model"
            f" alone, {alone:.3g}, so nothing can be saved: give the cheapest model first.",
            stacklevel=4,
        )


def full_cost_mapping(given: Any, costs: Mapping[str, Array], n: int) -> dict[str, float | Array]:
    """Return costs of the full model alone, a number or one per sample, by names of `costs`."""
    mapping_of_arrays("full_costs", given)
    found: dict[str, float | Array] = {}
    for name, value in given.items():
        checks.choice("full_costs", name, costs)
        title = f"full_costs['{name}']"
        if np.ndim(value) == 0:
            found[name] = checks.between(title, value, 0.0, np.inf)
            continue
        each = checks.finite(title, checks.numbers(title, value, np.float64))
        checks.of_shape(title, each, {"n": n})
        if (each < 0).any() or not each.any():
            raise ValueError(f"`{title}` must not be negative, and not 0 throughout.")
        found[name] = np.ascontiguousarray(each)
    return found


def gap_is_known_by_agreement(loss: str) -> bool:
    """Return whether equal outputs have equal losses, so that agreement makes the gap 0."""
    return loss in LOSSES and LOSSES[loss].of == "prediction"


def id_array(ids: ArrayLike | None, n: int) -> Array:
    """Return ids, by default 0 … n − 1; duplicates are refused."""
    if ids is None:
        return np.arange(n)
    array = checks.names("ids", ids, n)
    values, counts = np.unique(array, return_counts=True)
    if len(values) < n:
        twice = values[counts > 1][0]
        raise ValueError(
            f"`ids` must be unique, but {twice!s} is used {counts.max()} times: a sample counted"
            " twice voids the guarantee."
        )
    return array


def check_dtype(dtype: str | None) -> str | None:
    """Return the dtype; raise if it is not one of `DTYPES`."""
    return dtype if dtype is None else checks.choice("dtype", dtype, DTYPES)


def temperature_tuple(values: ArrayLike | None, n_exits: int) -> tuple[float, ...] | None:
    """Return one positive temperature per exit, or None."""
    if values is None:
        return None
    array = checks.numbers("temperatures", values, np.float64)
    checks.of_shape("temperatures", array, {"n_exits": n_exits})
    if not ((array >= COLDEST) & (array <= HOTTEST)).all():  # also refuses NaN
        raise ValueError(
            f"`temperatures` must be in [{COLDEST:g}, {HOTTEST:g}], but got {array.tolist()}."
        )
    return tuple(array.tolist())


def label_array(labels: ArrayLike, n: int, n_classes: int) -> Array:
    """Return class numbers, with -1 for missing labels (negative or NaN)."""
    array = checks.numbers("labels", labels)
    if array.shape != (n,):
        raise ValueError(
            f"`labels` must have shape ({n},), one per sample of `logits`, but got"
            f" {checks.shape_text(array.shape)}."
        )
    array = np.where(np.isnan(array), -1.0, array) if array.dtype.kind == "f" else array
    if (array != np.rint(array)).any():
        raise ValueError("`labels` must be whole numbers.")
    if array.max() >= n_classes:
        raise ValueError(
            f"`labels` must be 0 to {n_classes - 1}, because there are {n_classes} classes, but got"
            f" {array.max():g}."
        )
    numbers: Array = np.where(array < 0, np.int64(-1), array).astype(np.int64)
    return numbers


def mapping_of_arrays(name: str, given: Any) -> Mapping[str, Any]:
    """Return `given` if it is a mapping."""
    if not isinstance(given, Mapping):
        kind = type(given).__name__
        raise TypeError(f"`{name}` must be a mapping of names to arrays, but got a {kind}.")
    return given


def chosen_loss(record: Any, risk: str, loss: str | None) -> str:
    """Return `loss` if the record has it for this risk; if None, the only one it has."""
    kind = RISKS.choose(risk)
    if not getattr(record, kind.table):
        others = [f"'{other.name}'" for other in RISKS.values() if getattr(record, other.table)]
        raise ValueError(
            f"`risk`: this record has no {kind.needs}, so there is no {risk} to control; ask for"
            f" the risk {' or '.join(others)}."
        )
    return choose("loss", loss, getattr(record, kind.table))


def choose(name: str, value: str | None, options: Mapping[str, Any], preferred: str = "") -> str:
    """Return `value` if it is an option; if None, the only option or the preferred one."""
    if value is not None:
        return checks.choice(name, value, options)
    if len(options) == 1:
        return next(iter(options))
    if preferred in options:
        return preferred
    raise ValueError(f"`{name}` must be given; this record has: {', '.join(options)}.")
