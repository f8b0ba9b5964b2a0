"""Monitor: raises an alarm when the risk exceeds ε, with few false alarms over all time."""

import math
import os
import threading
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field, model_validator

from swiftsure._lib import checks
from swiftsure._lib.html import html_card
from swiftsure.certify.certificate import PromiseResult
from swiftsure.certify.policy import Policy
from swiftsure.certify.wording import WORDS, percent
from swiftsure.curves.measures import Measure
from swiftsure.curves.risks import RISKS
from swiftsure.losses import LossRange
from swiftsure.monitor import _evidence
from swiftsure.monitor.interval import risk_interval
from swiftsure.monitor.state import Section, read_state, write_state

__all__ = ["Monitor", "MonitorState"]

SLACK = 1e-6
"""How far rounding may carry a loss out of its range, relative to the largest loss."""

LEAST_ALPHA = 1e-190
"""Smallest α: below it, an alarm would need more evidence than `MAX_WEALTH`."""

Promised = Literal["risk", "mean", "pool", "nothing"]
"""What a policy promises to be at most ε: its risk, that on average over calibrations, or a pool's.

A monitor watches the risk; of the others an alarm says nothing for certain.
"""

CAVEATS = {
    "mean": (
        " This need not break the promise: the policy promises ε on average over the draw of its"
        " calibration samples, and its own risk may be above."
    ),
    "pool": (
        " This need not break the promise: the policy promises ε for the pool that its calibration"
        " samples were drawn from, and for no other requests."
    ),
    "nothing": " This breaks no promise: the policy makes none.",
}
"""What an alarm adds where the policy does not promise the risk that is watched."""

Wealth = Annotated[float, Field(ge=0.0, le=_evidence.MAX_WEALTH)]


class MonitorState(Section):
    """The state of a monitor."""

    epsilon: float
    alpha: float
    loss_range: tuple[float, float]
    risk: str | None
    loss: str | None
    n: int = Field(ge=0, le=2**53)
    total: float
    recent: float
    peak: float = Field(ge=1.0)
    alarm_at: int | None = Field(ge=1, le=2**53)
    promised: Promised = "risk"
    measure: Measure = Measure()
    wealth: tuple[Wealth, ...] = Field(min_length=_evidence.BETS, max_length=_evidence.BETS)

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        """Refuse numbers that no stream of losses leads to: an alarm might be lost."""
        Monitor(self.epsilon, self.alpha, self.loss_range).of_measure(self.measure)
        low, high = self.loss_range
        slack = SLACK * max(abs(low), abs(high))
        if not (low - slack) * self.n <= self.total <= (high + slack) * self.n:
            raise ValueError(f"the sum of {self.n:,} losses cannot be {self.total:g}")
        if self.n and not low - slack <= self.recent <= high + slack:
            raise ValueError(f"the mean of recent losses cannot be {self.recent:g}")
        evidence = float(_evidence.unspent(float(self.n))) + sum(self.wealth)
        if not min(evidence, _evidence.MAX_WEALTH) <= self.peak * (1 + 1e-9):
            raise ValueError(f"the evidence, {evidence:g}, exceeds its peak, {self.peak:g}")
        if self.n == 0 and (self.peak, sum(self.wealth)) != (1.0, 0.0):
            raise ValueError("there cannot be evidence before the first loss")
        if self.alarm_at is not None and self.alarm_at > self.n:
            raise ValueError(f"the alarm cannot be at loss {self.alarm_at:,} of {self.n:,}")
        certain = self.peak * self.alpha
        if certain < 1 - 1e-9 if self.alarm_at is not None else certain > 1 + 1e-9:
            raise ValueError(
                f"evidence of {self.peak:g} and alarm_at = {self.alarm_at} do not fit α ="
                f" {self.alpha:g}"
            )
        return self


class Monitor:
    """Watches losses one by one and raises an alarm when the risk exceeds ε.

    Memory and time per loss are constant.

    Parameters
    ----------
    epsilon : float
        Largest risk allowed, within the range of the losses.
    alpha : float
        Probability of a false alarm, over all time.
    loss_range : (low, high) or LossRange
        The range of the losses; `low` is negative for gaps. The stakes depend on it.
    risk, loss : str, optional
        Names of the risk and loss, for messages and audits.
    above : float, optional
        Watch the probability of a loss above this, instead of the mean loss; `loss_range` is then
        (0, 1), what is counted, and losses may be any numbers.

    Notes
    -----
    **Guarantee.** If the mean of each loss, given all that came before it, is at most ε, then an
    alarm is ever raised with probability at most α, however long the stream and however often one
    looks. Independent requests whose risk is at most ε satisfy this if losses are added in request
    order. An order or a choice that depends on the losses does not: add late ones through
    `RequestOrder`, and choose audits at random. If rows come in groups (frames of one video), add
    one mean loss per group.

    An alarm stays on. A new monitor has a new α. Several threads may share a monitor; losses then
    count in the order in which they are added, which must not depend on them.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> monitor = Monitor(epsilon=0.05, alpha=0.01)
    >>> monitor.update_many(rng.random(20_000) < 0.04)
    False
    >>> monitor.update_many(rng.random(2_000) < 0.10)
    True
    >>> monitor.alarm_at > 20_000
    True
    """

    def __init__(
        self,
        epsilon: float,
        alpha: float = 0.01,
        loss_range: LossRange | tuple[float, float] = (0.0, 1.0),
        *,
        risk: str | None = None,
        loss: str | None = None,
        above: float | None = None,
    ) -> None:
        self.loss_range = LossRange.of(loss_range)
        low, high = self.loss_range.low, self.loss_range.high
        self.epsilon = checks.between("epsilon", epsilon, low, high)
        self.alpha = checks.between("alpha", alpha, 0.0, 1.0)
        if self.alpha < LEAST_ALPHA:
            raise ValueError(f"`alpha` must be at least {LEAST_ALPHA:g}, but got {self.alpha:g}.")
        for name, text in {"risk": risk, "loss": loss}.items():
            if not isinstance(text, str | None):
                raise TypeError(f"`{name}` must be a name, but got {text!r:.200}.")
        self.risk, self.loss = risk, loss
        self.promised: Promised = "risk"
        self._low, self._high = low, high
        self._goal = 1.0 / self.alpha
        self._stakes = _evidence.stakes(self.epsilon, low)
        self._state = _evidence.new_state()
        self._saved: dict[str, str] = {}  # checksums of the state files that it continues
        self.lock = threading.RLock()
        self.of_measure(Measure(above=above))

    def of_measure(self, measure: Measure) -> Self:
        """Count losses as a promise with this measure does; `loss_range` is of what they count."""
        if not measure.reading.additive:
            raise ValueError(
                "A worst share cannot be watched: the mean of t + (loss − t)⁺ / share exceeds it"
                " for nearly every t, so an alarm of one t shows nothing. Watch a tail instead:"
                " Monitor(epsilon, loss_range=..., above=...)."
            )
        if measure.reading.any_loss and (self._low, self._high) != (0.0, 1.0):
            raise ValueError(
                f"`loss_range` must be (0, 1) with `{measure.kind}`, of what is counted."
            )
        self.measure = measure
        return self

    @classmethod
    def from_policy(
        cls,
        policy: Policy,
        alpha: float = 0.01,
        *,
        risk: str | None = None,
        loss: str | None = None,
        number: int | None = None,
    ) -> "Monitor":
        """Return a monitor for what a policy promises.

        Parameters
        ----------
        risk, loss : str, optional
            Which promise, if the policy makes several. To watch all of them, make one monitor for
            each, and split α among them.
        number : int, optional
            The promise's place in `policy.certificate.promises`, from 0, if its risk and loss are
            those of another one too.

        Notes
        -----
        Add losses as they are: a monitor of a tail counts those above its limit. Losses of
        production are not weighted, since production is what weights make a promise about. Of a
        promise about samples that exit early, add the losses of requests that exit early, and no
        others. Of a promise within slices, a monitor may see the requests of one slice, or all.

        For a policy calibrated by groups, add one number per group: the mean loss of the group if
        the policy averages over groups (`certificate.samples.average == "group"`). If it averages
        per sample, add Σℓ/M + ε (1 − m/M) for a group of m losses, with M its `max_group_size`.
        Audits see single requests, so they cannot feed such a monitor.

        An alarm shows that the risk exceeds ε. A policy of `crc` promises ε only on average over
        calibrations, and one with a `pool` only for that pool, so an alarm need not mean that the
        promise was broken; the monitor then says so.
        """
        if not isinstance(policy, Policy):
            raise TypeError(
                "`policy` must be a Policy, which says what it promises, but got"
                f" {type(policy).__name__}; load one with Policy.load."
            )
        promise = _find_promise(policy.certificate.promises, risk, loss, number)
        monitor = cls(
            promise.epsilon,
            alpha,
            _unweighted_range(policy, promise),
            risk=promise.risk,
            loss=promise.loss,
        ).of_measure(promise.measure)
        if policy.certificate.samples.unit == "groups":
            monitor.of_measure(Measure())  # a group's number is a mean of what counts already
        known: dict[str, Promised] = {"expectation": "mean", "none": "nothing"}
        pool: Promised = "risk" if policy.certificate.samples.population is None else "pool"
        monitor.promised = known.get(policy.certificate.guarantee, pool)
        return monitor

    def update(self, loss: float) -> bool:
        """Add one loss; return whether an alarm was raised, now or before.

        Raises
        ------
        ValueError
            If the loss is NaN or outside its range: both void the guarantee. Nothing is added.
        """
        value = self.accepted(loss)
        if self.measure.kind:
            value = float(self._counted(np.asarray(value)))
        with self.lock:
            _evidence.fold_one(self._state, self._stakes, self.epsilon, self._goal, value)
            return self.alarm

    def update_many(self, losses: ArrayLike) -> bool:
        """Add losses, (n,), in order; none of them if one is invalid.

        Gives bit for bit the same state as calling `update` for each, but handles tens of millions
        per second.
        """
        values = checks.numbers("losses", losses, np.float64)
        if values.ndim != 1:
            raise ValueError(
                f"`losses` must have shape (n,), but got {checks.shape_text(values.shape)}."
            )
        if values.size:
            checks.finite("losses", values)
            values = self._counted(values)
            values = checks.within("losses", values, self._low, self._high, SLACK * self._high)
            values = np.ascontiguousarray(values)
            with self.lock:
                _evidence.fold(self._state, self._stakes, self.epsilon, self._goal, values)
        return self.alarm

    def accepted(self, loss: float) -> float:
        """Return a loss as a float within the range; raise if it cannot be added."""
        value = loss if type(loss) is float else _number(loss)
        if self.measure.kind and math.isfinite(value):
            counted = float(self._counted(np.asarray(value)))
            checks.within("loss", np.asarray([counted]), self._low, self._high, SLACK * self._high)
            return value
        if self._low <= value <= self._high:
            return value
        slack = SLACK * self._high
        if not self._low - slack <= value <= self._high + slack:  # also refuses NaN
            raise ValueError(
                f"`loss` must lie in [{self._low:g}, {self._high:g}], but got {value:g}."
            )
        return min(max(value, self._low), self._high)

    @property
    def largest_loss(self) -> float:
        """A loss that counts as the largest."""
        return self.measure.reading.largest(self.measure, self.loss_range)

    def _counted(self, losses: Any) -> Any:
        """Return what losses count as."""
        return self.measure.reading.read(self.measure, losses)

    @property
    def n(self) -> int:
        """How many losses were added."""
        return int(self._state[_evidence.N])

    @property
    def mean(self) -> float:
        """Mean of all losses so far; NaN before the first."""
        return float(self._state[_evidence.TOTAL]) / self.n if self.n else math.nan

    @property
    def recent_mean(self) -> float:
        """Moving average over about the last 1,000 losses; no alarm depends on it."""
        return float(self._state[_evidence.RECENT]) if self.n else math.nan

    def interval(self, alpha: float = 0.05) -> tuple[float, float]:
        """Return an interval for the mean risk so far, valid at every moment: `risk_interval`.

        It is about the losses that were added. Where the lowest loss stands for one that is not
        known (a label that never came), the risk may be above its upper end; where the largest does
        (a server's audit that failed), below its lower end. No alarm depends on it.
        """
        with self.lock:
            n, total = self.n, float(self._state[_evidence.TOTAL])
        return risk_interval(n, total, self.loss_range, alpha)

    @property
    def alarm(self) -> bool:
        """Whether an alarm was raised."""
        return bool(self._state[_evidence.ALARM_AT] > 0.0)

    @property
    def alarm_at(self) -> int | None:
        """How many losses had been added when the alarm was raised; None if there was none."""
        return int(self._state[_evidence.ALARM_AT]) or None

    @property
    def evidence(self) -> float:
        """Current evidence that the risk exceeds ε: starts at 1, raises an alarm at 1/α."""
        return float(_evidence.unspent(float(self.n)) + self._state[_evidence.WEALTH :].sum())

    @property
    def p_value(self) -> float:
        """Anytime-valid p-value of "the risk was never above ε": 1 over the largest evidence."""
        return 1.0 / float(self._state[_evidence.PEAK])

    def state(self) -> MonitorState:
        """Return the state, from which `from_state` restores the monitor exactly."""
        with self.lock:
            held = self._state.copy()
        return MonitorState(
            epsilon=self.epsilon,
            alpha=self.alpha,
            loss_range=(self._low, self._high),
            risk=self.risk,
            loss=self.loss,
            promised=self.promised,
            measure=self.measure,
            n=int(held[_evidence.N]),
            total=float(held[_evidence.TOTAL]),
            recent=float(held[_evidence.RECENT]),
            peak=float(held[_evidence.PEAK]),
            alarm_at=int(held[_evidence.ALARM_AT]) or None,
            wealth=tuple(held[_evidence.WEALTH :].tolist()),
        )

    @classmethod
    def from_state(cls, state: MonitorState) -> "Monitor":
        """Return a monitor with this state."""
        monitor = cls(
            state.epsilon,
            state.alpha,
            state.loss_range,
            risk=state.risk,
            loss=state.loss,
        ).of_measure(state.measure)
        monitor.promised = state.promised
        monitor._state[:] = [
            state.n,
            state.total,
            state.recent,
            state.peak,
            state.alarm_at or 0,
            *state.wealth,
        ]
        return monitor

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to a JSON file, atomically.

        Raises
        ------
        ValueError
            If the file holds a state that this monitor does not continue, since an alarm in it
            would be lost: load that one, or choose another file.
        """
        with self.lock:
            place = os.path.realpath(path)
            known = self._saved.get(place)
            self._saved[place] = write_state(place, {"monitor": self.state()}, known)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Monitor":
        """Read a monitor from a state file; every field is checked.

        Raises
        ------
        ValueError
            If the file is not a monitor's state, is damaged, or comes from a newer version.
        """
        sections, checksum = read_state(path, {"monitor": MonitorState})
        monitor = cls.from_state(sections["monitor"])
        monitor._saved[os.path.realpath(path)] = checksum
        return monitor

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle by state, because a lock can be neither copied nor pickled."""
        return Monitor.from_state, (self.state(),)

    @property
    def promise(self) -> str:
        """Text that identifies the risk, ε, loss range and α: equal for equivalent monitors."""
        asked = "".join(
            f", {name} = {value!r}" for name, value in self.measure.measure_values.items()
        )
        return (
            f"{self.subject}{asked} ≤ {self.epsilon!r}, losses in [{self._low!r}, {self._high!r}],"
            f" α = {self.alpha!r}"
        )

    @property
    def subject(self) -> str:
        """The risk being monitored, in words."""
        if self.risk is None or self.loss is None:
            return "the risk"
        phrase = RISKS[self.risk].phrase if self.risk in RISKS else self.risk
        return WORDS[self.measure.kind].watched(self.measure, f"{self.loss} {phrase}")

    def __repr__(self) -> str:
        return f"Monitor(epsilon={self.epsilon:g}, alpha={self.alpha:g}, n={self.n:,})"

    def _repr_html_(self) -> str:
        facts = {
            "ε": f"{self.epsilon:g}",
            "losses seen": f"{self.n:,}",
            "alarm": "none" if self.alarm_at is None else f"at loss {self.alarm_at:,}",
        }
        return html_card("Monitor", facts, str(self))

    def __str__(self) -> str:
        """Return the status in one sentence."""
        if self.n == 0:
            return "No alarm: no loss was seen yet."
        means = f"mean loss {self.recent_mean:.4g} recently, {self.mean:.4g} over all {self.n:,}"
        if self.alarm_at is not None:
            return (
                f"Alarm at loss {self.alarm_at:,}: {self.subject} exceeds {self.epsilon:g}"
                f" ({means}). The chance of a false alarm is at most {percent(self.alpha)} over all"
                f" time.{CAVEATS.get(self.promised, '')}"
            )
        return (
            f"No alarm: {self.subject} may be at most {self.epsilon:g} ({means}); the evidence"
            f" against that is {self.evidence:.3g}, and an alarm is raised at {self._goal:g}."
        )


def _number(loss: float | bool) -> float:
    """Return any number as a float; booleans too, since `prediction != label` is a loss."""
    if isinstance(loss, bool):
        return float(loss)
    return checks.between("loss", loss, -np.inf, np.inf)


def _unweighted_range(policy: Policy, promise: PromiseResult) -> tuple[float, float]:
    """Return the range of a promise's losses in production, where they have no weights."""
    low, high = promise.loss_range
    certificate, asked = policy.certificate, policy.calibration
    # Only plain samples are tested as weight times loss; units of other kinds have sizes instead.
    sized = promise.selective or certificate.samples.unit == "groups"
    sized |= asked is not None and any(each.within == "each slice" for each in asked.risks)
    sized |= promise.within == "slices" and certificate.samples.horizon is not None
    weight = (
        1.0 if sized or certificate.samples.max_weight is None else certificate.samples.max_weight
    )
    return low / weight, high / weight


def _find_promise(
    promises: tuple[PromiseResult, ...],
    risk: str | None,
    loss: str | None,
    number: int | None = None,
) -> PromiseResult:
    """Return the only promise with this risk and loss, or that of a number."""
    if number is not None:
        if checks.count("number", number, 0) >= len(promises):
            raise ValueError(
                f"`number` must be below the number of promises, {len(promises)}, but got {number}."
            )
        promises = promises[number : number + 1]
    if risk is not None:
        checks.choice("risk", risk, dict.fromkeys(promise.risk for promise in promises))
    if loss is not None:
        checks.choice("loss", loss, dict.fromkeys(promise.loss for promise in promises))
    found = [p for p in promises if risk in (None, p.risk) and loss in (None, p.loss)]
    if len(found) != 1:
        choices = ", ".join(f"{p.risk} of {p.loss} ≤ {p.epsilon:g}" for p in promises)
        raise ValueError(
            "`risk` and `loss`, or `number`, must name one promise of the policy, which makes:"
            f" {choices}."
        )
    return found[0]
