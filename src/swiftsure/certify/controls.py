"""The four controls as functions of a curve: `swiftsure.control.ucb` and the others.

`Control` in `swiftsure.certify.control` holds one with its options.
"""

from swiftsure.certify.control import Control, ControlResult
from swiftsure.curves.curve import RiskCurve

__all__ = ["crc", "empirical", "ltt", "ucb"]


def empirical(
    curve: RiskCurve, epsilon: float, delta: float | None = None, bound: str = "auto"
) -> ControlResult:
    """Return the fastest setting whose calibration risk is at most ε (Eq. 9 of the paper).

    As in the paper, it may come after settings that fail.

    **Guarantee**: none. It exceeds ε about half of the time and is meant for comparison. `delta`
    and `bound` are ignored; they are accepted so that controls are interchangeable.

    Examples
    --------
    >>> from swiftsure.curves.curve import RiskCurve
    >>> empirical(RiskCurve.from_losses([1.0, 0.5], [[0, 0], [0, 0]]), epsilon=0.1).threshold
    0.5
    """
    return Control("empirical", bound).run(curve, epsilon, delta)


def crc(
    curve: RiskCurve,
    epsilon: float,
    delta: float | None = None,
    bound: str = "auto",
    *,
    monotone: bool | None = None,
    method: str = "crc",
    selection: str | None = None,
    delta_prime: float | None = None,
    zero_bounded: bool = False,
    seed: int | None = None,
) -> ControlResult:
    """Control the risk in expectation (conformal risk control).

    **Guarantee**: E[risk of the chosen setting] ≤ ε, over the draw of the calibration set, for
    `monotone=True` (the default) and `method="ucb"`; none for the selection rules, which exist to
    reproduce the paper. Its Proposition 1 does not hold as stated: Eq. 10 can exceed ε.

    Parameters
    ----------
    curve : RiskCurve
        Of losses relative to the full model. If setting 0 is not the full model, it is compared
        with ε too, and the full model, whose loss is 0, comes before the path.
    epsilon : float
        In (0, B).
    delta : float, optional
        Ignored; accepted so that controls are interchangeable.
    bound : str
        For `method="ucb"`.
    monotone : bool, optional
        Replace each sample's loss by its running maximum from the safe end: valid but cautious.
    method : {"crc", "ucb"}
        "ucb" tests with high probability at ε′ = (ε − δ′B)/(1 − δ′): valid without monotone
        losses. With many samples it is often less cautious, with few samples more so.
    selection : {"contiguous", "paper"}, optional
        Select on the unmodified losses: the last setting before the first failure, or, as in the
        paper's Eq. 10, the fastest setting that passes. No finite-sample guarantee.
    delta_prime : float, optional
        δ′ of `method="ucb"`, fixed beforehand.
    seed : int, optional
        For `method="ucb"`; as in `ucb`.

    Raises
    ------
    ValueError
        If the losses are not relative to the full model.

    Examples
    --------
    >>> from swiftsure.curves.curve import RiskCurve
    >>> curve = RiskCurve.from_losses([1.0, 0.5], [[0, 0]] * 99)
    >>> crc(curve, epsilon=0.01).threshold
    0.5
    """
    control = Control(
        "crc",
        bound=bound,
        zero_bounded=zero_bounded,
        monotone=monotone,
        method=method,
        selection=selection,
        delta_prime=delta_prime,
    )
    return control.run(curve, epsilon, delta, seed)


def ucb(
    curve: RiskCurve,
    epsilon: float,
    delta: float = 0.1,
    bound: str = "auto",
    *,
    zero_bounded: bool = False,
    seed: int | None = None,
    pool: int | None = None,
) -> ControlResult:
    """Control the risk with high probability (Eq. 12 of the paper).

    Settings are tested from the safe end, and the last one before the first failure is chosen.

    **Guarantee**: P(risk of the chosen setting ≤ ε) ≥ 1 − δ over the draw of the calibration set,
    with no monotonicity of losses or risk, for a path, order, loss, level and bound that were fixed
    before the calibration losses were seen.

    Parameters
    ----------
    curve : RiskCurve
    epsilon : float
        In (0, B).
    delta : float
        Failure probability, in (0, 1).
    bound : str
        Among `swiftsure.bounds.BOUNDS`; "auto" is an exact test for losses declared 0/1 or
        −1/0/1 (0-1 gaps), STaR otherwise.
    zero_bounded : bool
        Select on max(0, loss) (Eq. 16).
    seed : int, optional
        Fixes the order in which betting bounds see the samples. By default the curve's own seed,
        drawn at random when the curve or its record was made. With a seed given here, the samples
        must be in random order, unless it was itself drawn at random, once. Never choose among
        seeds.
    pool : int, optional
        Size of the finite pool that the samples (or groups) were drawn from without replacement;
        the promise is then about the pool's risk.

    Examples
    --------
    >>> from swiftsure.curves.curve import RiskCurve
    >>> curve = RiskCurve.from_losses([1.0, 0.5], [[0, 0]] * 100)
    >>> ucb(curve, epsilon=0.05).threshold, ucb(curve, epsilon=0.01).threshold
    (0.5, None)
    """
    return Control("ucb", bound=bound, zero_bounded=zero_bounded).run(
        curve, epsilon, delta, seed, pool
    )


def ltt(
    curve: RiskCurve,
    epsilon: float,
    delta: float = 0.1,
    bound: str = "auto",
    *,
    correction: str = "fixed_sequence",
    zero_bounded: bool = False,
    seed: int | None = None,
    pool: int | None = None,
) -> ControlResult:
    """Control the risk with high probability by multiple testing (Learn then Test).

    With a fixed sequence it chooses the same setting as `ucb` with the same bound. The paper's
    comparison of the two really compares bounds: WSR on plain losses and Hoeffding-Bentkus on
    zero-bounded ones (`bound="hoeffding_bentkus", zero_bounded=True`).

    **Guarantee**: as for `ucb`. With `correction="bonferroni"` every setting is tested at δ/K, and
    the fastest that passes is chosen.

    Examples
    --------
    >>> from swiftsure.curves.curve import RiskCurve
    >>> curve = RiskCurve.from_losses([1.0, 0.5], [[0, 0]] * 100)
    >>> ltt(curve, epsilon=0.05, bound="hoeffding_bentkus", zero_bounded=True).threshold
    0.5
    """
    return Control("ltt", bound=bound, zero_bounded=zero_bounded, correction=correction).run(
        curve, epsilon, delta, seed, pool
    )
