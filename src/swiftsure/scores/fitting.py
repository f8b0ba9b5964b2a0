"""Fits the weights of learned scores: a logistic regression per exit, tied to a common one."""

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

__all__ = ["logistic_weights"]

Floats = NDArray[np.float64]

TIE = 10.0
"""How strongly the slopes of an exit are drawn to those that all exits share.

With 100 pilot samples the exits of one network hardly differ from each other; with 2,000 they do.
"""

RIDGE = 1.0
"""How strongly the shared slopes are drawn to 0."""

LOOSE = 1e-3
"""The same for intercepts, which only need to be finite."""

DIGITS = 9
"""Digits of a weight, so that one pilot gives the same weights with every linear algebra."""


def logistic_weights(
    values: Floats, targets: Floats, rising: NDArray[np.bool_], shared: bool = False
) -> Floats:
    """Return intercept and slopes of each exit, or of all together.

    First one regression is fitted to all exits, with an intercept for each; then each exit's own,
    drawn to the common one. A slope whose feature is `rising` is at least 0: unconstrained slopes
    of correlated features may differ in sign, which puts samples like none of the pilot's first.

    Parameters
    ----------
    values : (n, n_early, n_features)
    targets : (n, n_early)
        In [0, 1]; NaN where not known.
    rising : (n_features,)
    shared : bool
        Return one regression for all exits, without an intercept for each.

    Returns
    -------
    weights : (n_early or 1, 1 + n_features)
    """
    n, n_early, n_features = values.shape
    known = ~np.isnan(targets)
    center, scale = _scales(values[known])
    x = (values - center) / scale
    smooth = _smoothed(targets, shared)
    lowest = np.where(rising, 0.0, -np.inf)
    which = np.zeros((n_early, 1)) if shared else np.eye(n_early)
    which = which if not shared else np.ones((n_early, 1))
    n_intercepts = which.shape[1]
    design = np.concatenate([np.broadcast_to(which, (n, n_early, n_intercepts)), x], axis=2)
    common = _newton(
        design[known],
        smooth[known],
        np.r_[np.full(n_intercepts, LOOSE), np.full(n_features, RIDGE)],
        np.zeros(n_intercepts + n_features),
        np.r_[np.full(n_intercepts, -np.inf), lowest],
    )
    found = np.column_stack(
        [common[:n_intercepts], np.tile(common[n_intercepts:], (n_intercepts, 1))]
    )
    if not shared:
        ties = np.r_[LOOSE, np.full(n_features, TIE)]
        for k in range(n_early):
            rows = known[:, k]
            own = np.column_stack([np.ones(rows.sum()), x[rows, k]])
            found[k] = _newton(own, smooth[rows, k], ties, found[k], np.r_[-np.inf, lowest])
    slopes = found[:, 1:] / scale
    weights = np.column_stack([found[:, 0] - slopes @ center, slopes])
    return np.asarray([[float(f"{w:.{DIGITS}g}") for w in row] for row in weights])


def _scales(rows: Floats) -> tuple[Floats, Floats]:
    spread = rows.std(axis=0)
    return rows.mean(axis=0), np.where(spread > 1e-9, spread, 1.0)


def _smoothed(targets: Floats, shared: bool) -> Floats:
    """Return targets without exact 0 and 1 (Platt 1999), so that no exit is ever certain."""
    axis = None if shared else 0
    agree = np.nansum(targets, axis=axis)
    apart = np.nansum(1 - targets, axis=axis)
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
