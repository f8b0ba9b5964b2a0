"""Audits: `AuditorBase` chooses requests at random, `AuditBase` holds both of their answers.

How requests are kept and run in full depends on the runtime; see `torch/audit.py` and
`onnx/audit.py`.
"""

import threading
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib import checks
from swiftsure.certify.policy import Policy
from swiftsure.losses import LOSSES, Loss
from swiftsure.monitor import Monitor, RequestOrder, request_ids
from swiftsure.monitor.ids import check_request_id

__all__ = ["AuditBase", "AuditorBase", "Chosen"]


@dataclass(frozen=True)
class AuditBase(ABC):
    """The answers served for some requests of a batch, with the full model's answers.

    Attributes
    ----------
    ids : tuple of str, (m,)
        Ids of the requests, in their order: the caller's own, or new ones (`request_ids`).
    rows : (m,)
        Their rows in the batch.
    exits : (m,)
        Their exits. Requests that ran in full anyway are audited as often as the others.
    outputs, full_outputs
        The outputs served and those of the last exit, with the samples first.
    failed : tuple of str, (k,)
        Ids of chosen requests whose audit failed, or that have no valid answer. An audit that
        failed is never a zero: in a `RequestOrder`, let it `arrive` as `monitor.largest_loss`.
    """

    ids: tuple[str, ...]
    rows: Any
    exits: Any
    outputs: Any
    full_outputs: Any
    failed: tuple[str, ...] = ()

    def losses(self, risk: str, loss: str | Loss, labels: Any = None) -> NDArray[np.float64]:
        """Return the losses to add to a monitor, unweighted, (m,).

        Parameters
        ----------
        risk : {"consistency", "gap", "zero-bounded gap"}
            "consistency" compares with the full model's outputs; a gap is the difference between
            both losses against labels.
        loss : str or Loss
        labels : (m,), optional
            Labels of the audited requests, for a gap; negative ones are missing.

        Returns
        -------
        losses
            NaN if a needed label is missing; a 0-1 gap is 0 without a label if both answers agree.
        """
        kind = checks.choice("risk", risk, ["consistency", "gap", "zero-bounded gap"])
        named = LOSSES.choose(loss)
        if kind == "consistency":
            return self._inconsistencies(named)
        if labels is None:
            raise ValueError("`labels` must be given for a gap: it compares losses against labels.")
        gaps = self._gaps(named, labels)
        return gaps if kind == "gap" else np.maximum(gaps, 0.0)

    @abstractmethod
    def _inconsistencies(self, loss: Loss) -> NDArray[np.float64]:
        """Return the losses of the answers against the full model's."""

    @abstractmethod
    def _gaps(self, loss: Loss, labels: Any) -> NDArray[np.float64]:
        """Return the losses against labels less those of the full model."""


class Chosen(Protocol):
    """Requests of a batch that were chosen for an audit."""

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the requests."""


class AuditorBase(ABC):
    """Runs randomly chosen requests in full and passes their losses to a monitor.

    Each request is chosen with the same probability, independently of its content, so the mean
    loss of audited requests estimates the risk without weights.

    Parameters
    ----------
    rate : float
        Probability that a request is audited, in (0, 1].
    monitor : Monitor, optional
        Must watch a consistency risk; losses are added in request order as audits finish. Gaps
        need labels: add `Audit.losses` through a `RequestOrder` when the labels arrive.
    seed : int or Generator, optional
        By default the operating system seeds the choice, so that clients cannot predict it.

    Attributes
    ----------
    requests : int
        How many requests there were, audited or not.
    failed : int
        How many audits failed, for example because the full model ran out of memory. The answer is
        still served, and there is one warning. Each such request counts as the largest loss, so an
        alarm may come from audits that fail; it is never hidden by them.

    Raises
    ------
    ValueError
        If the monitor watches a risk that needs labels, an unknown loss, or a loss whose range
        differs from the one audits compute: a record made with `label="argmax"` or `"sample"`
        promises another Brier loss.
    """

    against_last: ClassVar[str]
    """Field of a `Loss` that audits compute."""

    def __init__(
        self,
        rate: float,
        monitor: Monitor | None = None,
        *,
        seed: int | np.random.Generator | None = None,
    ) -> None:
        self.rate = checks.between("audit", rate, 0.0, np.nextafter(1.0, 2.0))
        self.order = None if monitor is None else RequestOrder(monitor)
        self.loss = None if monitor is None else self._consistency_loss(monitor)
        self.requests = 0
        self.failed = 0
        self._rng = np.random.default_rng(seed)
        self._lock = threading.Lock()  # threads take request numbers and random draws in turn

    @classmethod
    def of(
        cls, audit: "float | Self | None", monitor: Monitor | None, policy: Policy
    ) -> "Self | None":
        """Return the auditor that a runtime was given, or asked for by a rate."""
        if audit is None:
            if monitor is not None:
                raise ValueError("`monitor` needs `audit`, the share of requests to feed it with.")
            return None
        if isinstance(audit, cls) and monitor is not None:
            raise ValueError("`monitor` must be given to the Auditor, not beside it.")
        auditor = audit if isinstance(audit, cls) else cls(audit, monitor)  # type: ignore[arg-type]
        auditor.refuse_policy(policy)
        return auditor

    @abstractmethod
    def _kept(self, fast: Any, batch: Any, ids: Sequence[str], rows: NDArray[np.int64]) -> Chosen:
        """Return copies of the inputs of some rows of a batch, whose ids are `ids`."""

    @abstractmethod
    def _n(self, fast: Any, batch: Any) -> int:
        """Return the number of requests in a batch."""

    @abstractmethod
    def _compared(self, fast: Any, out: Any, chosen: Any, failed: tuple[str, ...]) -> Any:
        """Return the audit of requests, after running in full those that exited early."""

    @abstractmethod
    def _nothing(self, out: Any, chosen: Any, failed: tuple[str, ...]) -> Any:
        """Return an audit without requests, and the ids of those whose audit failed."""

    def _answered(self, out: Any, chosen: Any) -> tuple[Any, Any]:  # noqa: ARG002
        """Return those of the requests that have a valid answer, and those that have none."""
        return chosen, None

    def _context(self, fast: Any, out: Any) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return the context in which a runtime runs its model."""
        return nullcontext()

    def __getstate__(self) -> dict[str, Any]:
        """Refuse copying and pickling, including as part of an `EarlyExit`."""
        raise TypeError(
            "An Auditor cannot be copied or pickled: each copy would feed a monitor of its own."
            " Copy the model and the policy, and make a new EarlyExit with"
            " `audit=Auditor(rate, monitor)`."
        )

    def refuse_policy(self, policy: Policy) -> None:
        """Raise if the monitor does not match the policy's promises, or the policy uses groups."""
        if self.order is None:
            return
        found = self.order.monitor
        certificate = policy.certificate
        if (found.risk, found.loss, found.epsilon, found.measure) not in [
            (each.risk, each.loss, each.epsilon, each.measure)
            for each in certificate.promises
            if each.auditable
        ]:
            promises = ", ".join(
                f"{p.risk} of {p.loss} ≤ {p.epsilon:g}" for p in certificate.promises
            )
            raise ValueError(
                f"`monitor` must watch what the policy promises ({promises}), but it watches"
                f" {found.risk} of {found.loss} ≤ {found.epsilon:g}: make it with"
                " Monitor.from_policy, or add `out.audit.losses(...)` to it yourself."
            )
        if certificate.samples.unit == "groups":
            each = "one mean of `out.audit.losses(...)` per group"
            if certificate.samples.average == "sample":
                each = (
                    "Σℓ/M + ε (1 − m/M) per group, for its m losses of `out.audit.losses(...)` and"
                    f" M = {certificate.samples.max_group_size}"
                )
            raise ValueError(
                "`monitor` must not be fed by audits if the policy was calibrated by groups, as"
                f" they see single requests: add {each} to it yourself."
            )

    def run(
        self,
        fast: Any,
        batch: Any,
        answer: Callable[[Any], Any],
        ids: Sequence[str] | None = None,
    ) -> Any:
        """Return the answer to a batch, with an audit of some of its requests."""
        chosen = self._choose(fast, batch, ids)
        try:
            return self._with_audit(fast, answer(batch), chosen)
        except BaseException:  # answering failed: a failed audit alone does not raise
            self._give_up(chosen)
            raise

    def follow(
        self,
        fast: Any,
        batches: Iterable[Any],
        answer: Callable[[Iterator[Any]], Iterator[Any]],
    ) -> Iterator[Any]:
        """Yield the answers to many batches, in order but delayed, with some requests audited."""
        waiting: deque[Chosen] = deque()

        def noted() -> Iterator[Any]:
            for batch in batches:
                waiting.append(self._choose(fast, batch))
                yield batch

        try:
            for out in answer(noted()):
                with self._context(fast, out):
                    audited = self._with_audit(fast, out, waiting[0])
                waiting.popleft()
                yield audited
        finally:  # if stopped early, the waiting requests will not be answered
            for chosen in waiting:
                self._give_up(chosen)

    def _choose(self, fast: Any, batch: Any, ids: Sequence[str] | None = None) -> Chosen:
        """Choose some requests of a batch at random, before they are run."""
        n = self._n(fast, batch)
        if ids is not None and (len(ids) != n or len(set(ids)) != n):
            raise ValueError(
                f"`ids` must hold {n} different strings, one per sample, but got {len(ids)},"
                f" {len(set(ids))} of them different."
            )
        given = None if ids is None else [check_request_id("ids", each) for each in ids]
        with self._lock:
            rows = np.flatnonzero(self._rng.random(n) < self.rate)
            # Copied before the batch runs, since a model may overwrite its inputs; and before
            # `expect`, since if copying failed, later requests would wait for these forever.
            names = request_ids(n) if given is None else given  # in turn, so that they ascend
            chosen = self._kept(fast, batch, [names[k] for k in rows.tolist()], rows)
            self.requests += n
            if self.order is not None:
                for request in chosen.ids:
                    self.order.expect(request)
        return chosen

    def _with_audit(self, fast: Any, out: Any, chosen: Any) -> Any:
        """Return an answer with its audit; if the audit fails, the answer is still returned."""
        unanswered: tuple[str, ...] = ()
        try:
            chosen, invalid = self._answered(out, chosen)
            if invalid is not None:
                unanswered = invalid.ids
                self._give_up(invalid)
            if len(chosen.ids) == 0:
                return replace(out, audit=self._nothing(out, chosen, unanswered))
            audit = self._compared(fast, out, chosen, unanswered)
            self._fold(audit)
        except Exception as error:
            self._failed(chosen, error)
            audit = self._nothing(out, chosen, unanswered + chosen.ids)
        return replace(out, audit=audit)

    def _failed(self, chosen: Chosen, error: Exception) -> None:
        """Count failed audits, as the largest loss too, and warn the first time."""
        self._fold_largest(chosen)
        with self._lock:
            first = self.failed == 0
            self.failed += len(chosen.ids)
        if first:
            warnings.warn(
                f"The audit of {len(chosen.ids)} requests failed ({type(error).__name__}: {error})."
                " They were answered, and count as the largest loss. This warning appears once;"
                " `failed` of the Auditor counts all such requests.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _fold(self, audit: Any) -> None:
        if self.order is None or self.loss is None:
            return
        losses = audit.losses("consistency", self.loss).tolist()
        with self._lock:
            for request, loss in zip(audit.ids, losses, strict=True):
                self.order.arrive(request, loss)

    def _fold_largest(self, chosen: Chosen) -> None:
        """Count requests whose audit failed as the largest loss; give up those that cannot be."""
        if self.order is None:
            return
        worst = self.order.monitor.largest_loss
        with self._lock:
            for request in filter(self.order.waits_for, chosen.ids):
                try:
                    self.order.arrive(request, worst)
                except Exception:
                    self.order.give_up(request)

    def _give_up(self, chosen: Chosen) -> None:
        """Stop waiting for requests whose losses will not arrive."""
        if self.order is None:
            return
        with self._lock:
            for request in chosen.ids:
                if self.order.waits_for(request):
                    self.order.give_up(request)

    def _consistency_loss(self, monitor: Monitor) -> Loss:
        if monitor.risk != "consistency" or monitor.loss is None:
            raise ValueError(
                "`monitor` must watch a consistency risk to be fed by audits, but it watches"
                f" {monitor.risk or 'an unnamed risk'}: gaps need labels, so add"
                " `out.audit.losses(...)` through a RequestOrder when the labels arrive."
            )
        loss = LOSSES.choose(monitor.loss)
        loss.function(self.against_last)
        expected, found = loss.range, monitor.loss_range
        if (found.low, found.high) != (expected.low, expected.high):
            raise ValueError(
                f"`monitor` must watch losses in [{expected.low:g}, {expected.high:g}], as audits"
                f" compute {loss.name}, but its losses are in [{found.low:g}, {found.high:g}]: a"
                " record made with label='sample' or 'argmax' promises a loss that audits do not"
                " compute."
                " Make the record with label='expected', or add losses of your own."
            )
        return loss
