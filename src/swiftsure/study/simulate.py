"""A simulated early-exit classifier whose true risks are known exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from swiftsure._lib import checks

__all__ = ["Population", "SimulatedSample"]

FloatArray = npt.NDArray[np.float64]
Thresholds = npt.ArrayLike | Sequence[float | None] | Sequence[Sequence[float | None]]

# Chosen so that a default population looks like a trained image classifier.
_ATOMS = 64  # number of difficulties, all equally likely
_SPREAD = 2.0  # concentration of the Beta distribution of difficulty
_STEEPNESS = 10.0  # how sharply an exit fails once a sample's difficulty exceeds its ability
_FIRST_ABILITY, _LAST_ABILITY = 0.615, 0.89
_DOUBT = 0.005  # mean certainties stay this far from 0 and from 1
_PRECISION = 4.0  # concentration of an exit's certainties around their mean
_SAME_MISTAKE = 0.8  # how often a wrong answer is the sample's typical mistake
_CLIP = 1e-6  # keeps the predicted class the argmax, and its confidence below 1, in float32


@dataclass(frozen=True, eq=False)
class SimulatedSample:
    """Labels of simulated samples, and the classifier's logits at every exit.

    Attributes
    ----------
    logits : (n, n_exits, n_classes) float32
        Logarithms of the predictive probabilities.
    labels : (n,) int64
        The true classes.
    """

    logits: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]


class _Moments(NamedTuple):
    """E[f · 1{confidence ≥ threshold}] for five f, by setting and difficulty, `(K, _ATOMS)`.

    a is the certainty; p is the probability of a right answer given a, without overthinking.
    """

    one: FloatArray
    a: FloatArray
    aa: FloatArray
    p: FloatArray
    ap: FloatArray


@dataclass(frozen=True)
class Population:
    """A population of samples and an early-exit classifier whose true risks are known.

    A sample has a difficulty, drawn from 64 equally likely values; given it, the exits are
    independent. Exit l reports a certainty a ~ Beta, whose mean falls steeply once the difficulty
    exceeds the exit's ability, which grows with l. It puts the top-1 confidence
    c = 1/C + (1 - 1/C)·a on its predicted class and shares the rest equally among the others.
    Hence easy samples cluster near confidence 1, exits disagree mostly on hard samples, and both
    signs of the 0-1 gap occur. Given a, an answer is right with a probability linear in a, so
    every risk is a sum of truncated Beta moments: exact up to the accuracy of
    `scipy.special.betainc`. Sampled logits are float32 and keep a within [1e-6, 1 - 1e-6].

    Attributes
    ----------
    n_exits : int
        Number of exits, at least 2; the last one is the full model.
    n_classes : int
        Number of classes C, at least 2.
    difficulty : float
        Mean difficulty of the samples, in (0, 1). The first and last of five exits are right on
        96 and 99 % of ten-class samples at 0.1, on 75 and 92 % at 0.4, on 43 and 72 % at 0.7.
    overconfidence : float
        In [0, 5]. At 0 confidences are calibrated: P(right | c) = c at every exit (without
        overthinking). Otherwise the odds of the mean certainty are multiplied by
        exp(overconfidence) at the first exit and by less at each later one; the last exit stays
        calibrated. Accuracies do not change.
    overthinking : float
        In [0, 1]. The probability that a sample leads the classifier astray: starting at a random
        exit after the first, all answers are wrong, and as confident as before.

    Raises
    ------
    ValueError, TypeError
        If a parameter lies outside its range, or a count is not an integer.

    Examples
    --------
    >>> population = Population()
    >>> population.accuracies.round(2)
    array([0.75, 0.83, 0.89, 0.91, 0.92])
    >>> population.risk([None, 0.95, 0.5], risk="consistency").round(3)
    array([0.   , 0.023, 0.152])
    """

    n_exits: int = 5
    n_classes: int = 10
    difficulty: float = 0.4
    overconfidence: float = 0.0
    overthinking: float = 0.0

    def __post_init__(self) -> None:
        checks.count("n_exits", self.n_exits, least=2)
        checks.count("n_classes", self.n_classes, least=2)
        if not 0 < self.difficulty < 1:
            raise ValueError(f"`difficulty` must be in (0, 1), but got {self.difficulty}.")
        # Above 5, many confidences would differ from 1 by less than float32 can resolve.
        if not 0 <= self.overconfidence <= 5:
            raise ValueError(f"`overconfidence` must be in [0, 5], but got {self.overconfidence}.")
        if not 0 <= self.overthinking <= 1:
            raise ValueError(f"`overthinking` must be in [0, 1], but got {self.overthinking}.")

    def sample(self, n: int, seed: int | np.random.Generator) -> SimulatedSample:
        """Draw `n` independent samples.

        `seed` is an int or a `numpy.random.Generator`, which is advanced.

        Examples
        --------
        >>> Population(n_classes=3).sample(100, seed=0).logits.shape
        (100, 5, 3)
        """
        checks.count("n", n)
        rng = np.random.default_rng(seed)
        C, shape = self.n_classes, (n, self.n_exits)
        labels = rng.integers(C, size=n)

        alpha, beta, honesty = self._latent()[:, rng.integers(_ATOMS, size=n)]
        # Draw the doubt 1 - a rather than a, because floats are more precise near 0 than near 1.
        doubt = rng.beta(beta, alpha).clip(_CLIP, 1 - _CLIP)
        p = 1 / C + (1 - 1 / C) * honesty * (1 - doubt)
        astray = rng.random(n) < self.overthinking
        onset = np.where(astray, rng.integers(1, self.n_exits, size=n), self.n_exits)
        right = (rng.random(shape) < p) & (np.arange(self.n_exits) < onset[:, None])

        typical = rng.integers(1, C, size=(n, 1))  # typical mistake, as an offset from the label
        step = np.where(rng.random(shape) < _SAME_MISTAKE, typical, rng.integers(1, C, size=shape))
        predictions = (labels[:, None] + np.where(right, 0, step)) % C

        other = np.log(doubt / C).astype(np.float32)
        top = np.log1p(-doubt * (1 - 1 / C)).astype(np.float32)
        logits = np.repeat(other[:, :, None], C, axis=2)
        np.put_along_axis(logits, predictions[:, :, None], top[:, :, None], axis=2)
        return SimulatedSample(logits, labels)

    @property
    def accuracies(self) -> FloatArray:
        """True accuracy of each exit on all samples, `(n_exits,)`."""
        return 1 - self.mean_losses("zero_one")

    def mean_losses(self, loss: str = "zero_one") -> FloatArray:
        """Return the true mean loss of each exit on all samples, (n_exits,).

        `loss` is "zero_one" or "brier", Σ_k (p_k - 1[y = k])².

        Examples
        --------
        >>> Population().mean_losses("brier").round(2)
        array([0.32, 0.23, 0.17, 0.13, 0.12])
        """
        checks.choice("loss", loss, ["zero_one", "brier"])
        everyone = (self._moments(exit_, np.ones(1)) for exit_ in range(self.n_exits))
        return np.array([self._loss(exit_, m, loss).mean() for exit_, m in enumerate(everyone)])

    def exit_probabilities(self, thresholds: Thresholds) -> FloatArray:
        """Return the true probability of taking each exit, (K, n_exits).

        Parameters
        ----------
        thresholds : (K,) or (K, n_exits - 1)
            One shared threshold, or one per exit, for each of K settings; `None` and inf mean never
            exit. A sample takes the first exit whose top-1 confidence reaches its threshold, else
            the last.

        Examples
        --------
        >>> Population(n_exits=3).exit_probabilities([None, 0.9, 0.0]).round(2)
        array([[0.  , 0.  , 1.  ],
               [0.56, 0.19, 0.25],
               [1.  , 0.  , 0.  ]])
        """
        visits = self._visits(self._doubts(thresholds))
        return np.stack([(reached * m.one).mean(axis=1) for reached, m in visits], axis=1)

    def risk(self, thresholds: Thresholds, risk: str = "gap", loss: str = "zero_one") -> FloatArray:
        """Return the true risk of early exiting, relative to the last exit, (K,).

        Parameters
        ----------
        thresholds : (K,) or (K, n_exits - 1)
            As in `exit_probabilities`.
        risk : {"gap", "zero-bounded gap", "consistency"}
            The gap is E[ℓ(exit, y) - ℓ(last, y)]; zero-bounded, negative differences count as 0,
            which is not available for the Brier loss. Consistency is the probability that exit and
            last exit predict different classes ("zero_one"), or the mean squared distance
            E‖p_exit - p_last‖² of their predictive distributions ("brier").
        loss : {"zero_one", "brier"}
            Brier is Σ_k (p_k - 1[y = k])².

        Examples
        --------
        Trusting calibrated confidences keeps the gap below 1 - λ = 0.05 here; trusting
        overconfident ones does not:

        >>> Population().risk([0.95]).round(3)
        array([0.002])
        >>> Population(overconfidence=3.0).risk([0.95]).round(3)
        array([0.082])
        """
        checks.choice("risk", risk, ["gap", "zero-bounded gap", "consistency"])
        known = ["zero_one"] if risk == "zero-bounded gap" else ["zero_one", "brier"]
        checks.choice("loss", loss, known)
        doubts = self._doubts(thresholds)
        last = self._moments(-1, np.ones(1))
        total = np.zeros(len(doubts))
        # Samples that reach the last exit lose nothing, so that exit is skipped.
        for exit_, (reached, here) in enumerate(self._visits(doubts[:, :-1])):
            if risk == "consistency":
                relative = self._inconsistency(exit_, here, last, loss)
            elif risk == "zero-bounded gap":  # wrong here and right at the last exit
                relative = self._kept(-1) * last.p * (here.one - here.p)
            else:
                relative = self._loss(exit_, here, loss) - here.one * self._loss(-1, last, loss)
            total += (reached * relative).mean(axis=1)
        return total

    def _latent(self) -> FloatArray:
        """Return alpha, beta and honesty of the certainties, `(3, _ATOMS, n_exits)`.

        Honesty is the ratio of the true to the claimed mean certainty; 1 means calibrated.
        """
        quantiles = (np.arange(_ATOMS) + 0.5) / _ATOMS
        shape = _SPREAD * self.difficulty, _SPREAD * (1 - self.difficulty)
        difficulties = special.betaincinv(*shape, quantiles)[:, None]
        progress = np.linspace(0, 1, self.n_exits)
        gain = 1 - (1 - progress) ** 2  # later exits add less
        abilities = _FIRST_ABILITY + (_LAST_ABILITY - _FIRST_ABILITY) * gain
        true = special.expit(_STEEPNESS * (abilities - difficulties))
        true = _DOUBT + (1 - 2 * _DOUBT) * true
        claimed = special.expit(special.logit(true) + self.overconfidence * (1 - progress))
        # Keep both Beta parameters at least 1: a spike at 0 or 1 would give ties in float32.
        precision = _PRECISION + 1 / (claimed * (1 - claimed))
        return np.stack([precision * claimed, precision * (1 - claimed), true / claimed])

    def _doubts(self, thresholds: Thresholds) -> FloatArray:
        """Return the largest doubt 1 - a that exits, by setting and exit, `(K, n_exits)`."""
        entries = np.asarray(thresholds, dtype=object)
        flat = [np.inf if entry is None else entry for entry in entries.ravel()]
        values = np.array(flat, dtype=np.float64).reshape(entries.shape)
        early = self.n_exits - 1
        if values.ndim == 0 or values.shape[1:] not in ((), (early,)):
            raise ValueError(
                f"`thresholds` must have shape (K,) or (K, n_exits - 1) = (K, {early}), "
                f"but got {values.shape}."
            )
        if np.isnan(values).any():
            raise ValueError("`thresholds` must not hold NaN; `None` or inf means never exit.")
        if values.ndim == 1:
            values = np.repeat(values[:, None], early, axis=1)
        doubts = np.clip((1 - values) / (1 - 1 / self.n_classes), 0.0, 1.0)
        return np.column_stack([doubts, np.ones(len(doubts))])

    def _visits(self, doubts: FloatArray) -> Iterator[tuple[FloatArray, _Moments]]:
        """Yield for each exit the probability of reaching it and the moments of its samples."""
        reached = np.ones((len(doubts), _ATOMS))
        for exit_ in range(doubts.shape[1]):
            moments = self._moments(exit_, doubts[:, exit_])
            yield reached, moments
            reached = reached * (1 - moments.one)

    def _moments(self, exit_: int, doubts: FloatArray) -> _Moments:
        alpha, beta, honesty = self._latent()[:, :, exit_]
        chance, x = 1 / self.n_classes, doubts[:, None]
        mean = alpha / (alpha + beta)
        one: FloatArray = special.betainc(beta, alpha, x)
        a = mean * special.betainc(beta, alpha + 1, x)
        aa = mean * (alpha + 1) / (alpha + beta + 1) * special.betainc(beta, alpha + 2, x)
        slope = (1 - chance) * honesty
        return _Moments(one, a, aa, chance * one + slope * a, chance * a + slope * aa)

    def _kept(self, exit_: int) -> float:
        """Return the probability that a sample is not led astray up to an exit."""
        return float(1 - self.overthinking * np.linspace(0, 1, self.n_exits)[exit_])

    def _loss(self, exit_: int, m: _Moments, loss: str) -> FloatArray:
        """Return the moment of the loss against the label."""
        kept, chance = self._kept(exit_), 1 / self.n_classes
        if loss == "zero_one":
            return m.one - kept * m.p
        # With u uniform and v_k = e_k - u: the prediction is u + a·v_k, the label u + v_y, and
        # ⟨v_k, v_y⟩ = 1[k = y] - 1/C. The same algebra serves two exits below.
        return (1 - chance) * (m.one + m.aa) - 2 * (kept * m.ap - chance * m.a)

    def _inconsistency(self, exit_: int, here: _Moments, last: _Moments, loss: str) -> FloatArray:
        """Return the moment of the loss against the last exit (independent given difficulty)."""
        kept, kept_last, chance = self._kept(exit_), self._kept(-1), 1 / self.n_classes
        alike = _SAME_MISTAKE**2 + (1 - _SAME_MISTAKE**2) / (self.n_classes - 1)

        def same(x: FloatArray, xp: FloatArray, y: FloatArray, yp: FloatArray) -> FloatArray:
            """E[x · y · 1{same prediction}], from the moments of x and y alone and times p."""
            # A sample not astray at the last exit was never astray, hence only `kept_last`.
            right = kept_last * xp * yp
            return right + alike * (x * y - kept * xp * y - kept_last * x * yp + right)

        if loss == "zero_one":
            return here.one - same(here.one, here.p, last.one, last.p)
        squares = here.aa * last.one + here.one * last.aa
        products = same(here.a, here.ap, last.a, last.ap) - chance * here.a * last.a
        return (1 - chance) * squares - 2 * products
