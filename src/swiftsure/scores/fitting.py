"""Fits the weights of learned scores: a logistic regression per exit, tied to a common one."""

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

__all__ = ["logistic_weights"]

Floats = NDArray[np.float64]

TIE = 10.0
"""How strongly the weights of an exit are drawn to those that all exits share.

With 100 pilot samples the exits of one network hardly differ from each other; with 2,000 they do.
"""

RIDGE = 1.0
"""How strongly the shared slopes are drawn to 0."""

LOOSE = 1e-3
"""The same for the shared intercept, which only needs to be finite."""

DIGITS = 9
"""Digits of a weight, so that one pilot gives the same weights with every linear algebra."""


def logistic_weights(
    values: Floats, targets: Floats, rising: NDArray[np.bool_], shared: bool = False
) -> Floats:
    """Return intercept and slopes of each exit, or of all together.

    First one regression is fitted to all exits together; then each exit's own, drawn to the common
    one, which an exit without any disagreement hardly leaves. A slope whose feature is `rising` is
    at least 0: unconstrained slopes of correlated features may differ in sign, which puts samples
    like none of the pilot's first.

    Parameters
    ----------
    values : (n, n_early, n_features)
    targets : (n, n_early)
        In [0, 1]; NaN where not known.
    rising : (n_features,)
    shared : bool
        Return the common regression alone.

    Returns
    -------
    weights : (n_early or 1, 1 + n_features)
    """
    n, n_early, n_features = values.shape
    known = ~np.isnan(targets)
    center, scale = _scales(values[known])
    design = np.concatenate([np.ones((n, n_early, 1)), (values - center) / scale], axis=2)
    smooth = _smoothed(targets)
    lowest = np.r_[-np.inf, np.where(rising, 0.0, -np.inf)]
    loose = np.r_[LOOSE, np.full(n_features, RIDGE)]
    common = _newton(design[known], smooth[known], loose, np.zeros(1 + n_features), lowest)
    ties, found = np.full(1 + n_features, TIE), common[None]
    if not shared:
        exits = [(design[rows, k], smooth[rows, k]) for k, rows in enumerate(known.T)]
        found = np.stack([_newton(x, y, ties, common, lowest) for x, y in exits])
    slopes = found[:, 1:] / scale
    weights = np.column_stack([found[:, 0] - slopes @ center, slopes])
    return np.asarray([[float(f"{w:.{DIGITS}g}") for w in row] for row in weights])


def _scales(rows: Floats) -> tuple[Floats, Floats]:
    spread = rows.std(axis=0)
    return rows.mean(axis=0), np.where(spread > 1e-9, spread, 1.0)


def _smoothed(targets: Floats) -> Floats:
    """Return targets without exact 0 and 1 (Platt 1999), so that no exit is ever certain."""
    agree, apart = np.nansum(targets), np.nansum(1 - targets)
    return np.asarray(targets * (agree + 1) / (agree + 2) + (1 - targets) / (apart + 2))


def _newton(x: Floats, y: Floats, ridge: Floats, prior: Floats, lowest: Floats) -> Floats:
    """Return the weights of largest penalised likelihood that are not below `lowest`."""
    weights = np.maximum(prior, lowest)

    def objective(w: Floats) -> float:
        z = x @ w
        loss = np.logaddexp(0.0, z) - y * z
        return float(loss.sum() + 0.5 * (ridge * (w - prior) ** 2).sum())

    value = objective(weights)
    for _ in range(100):
        p = expit(x @ weights)
        gradient = x.T @ (p - y) + ridge * (weights - prior)
        free = ~((weights <= lowest) & (gradient > 0))
        part = x[:, free]
        curvature = (part * (p * (1 - p))[:, None]).T @ part + np.diag(ridge[free])
        step = np.zeros_like(weights)
        step[free] = np.linalg.solve(curvature, gradient[free])
        length = 1.0
        while True:
            tried = np.maximum(weights - length * step, lowest)
            new = objective(tried)
            if new <= value or length < 1e-9:
                break
            length /= 2
        moved = np.abs(tried - weights).max()
        if new <= value:
            weights, value = tried, new
        if moved < 1e-10 or length < 1e-9:
            break
    return weights
