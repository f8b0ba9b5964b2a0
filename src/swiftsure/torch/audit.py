"""Audits: also run a random fraction of requests in full, to measure what early exits cost."""

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from swiftsure import checks
from swiftsure.losses import LOSSES, PIXEL_LOSSES, Loss
from swiftsure.monitor import Monitor, RequestOrder, request_ids
from swiftsure.monitor.ids import check_request_id
from swiftsure.policy import Policy
from swiftsure.torch.losses import label_losses
from swiftsure.torch.results import ExitOutput, refuse_broken
from swiftsure.torch.segmentation import image_losses, image_size
from swiftsure.torch.staged import batch_size, device_of, plain_output, rows_of

if TYPE_CHECKING:
    from swiftsure.torch.runtime import EarlyExit

__all__ = ["Audit", "Auditor"]


@dataclass(frozen=True)
class Audit:
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
    size : (height, width), optional
        Size of the input images, at which logit maps are compared.
    failed : tuple of str, (k,)
        Ids of chosen requests whose audit failed, or that have no valid answer. Their losses
        are missing: `expect` and `give_up` them in a `RequestOrder`.
    """

    ids: tuple[str, ...]
    rows: Tensor
    exits: Tensor
    outputs: Any
    full_outputs: Any
    size: tuple[int, int] | None = None
    failed: tuple[str, ...] = ()

    def losses(
        self, risk: str, loss: str | Loss, labels: Tensor | None = None
    ) -> NDArray[np.float64]:
        """Return the losses to add to a monitor, unweighted, (m,).

        Parameters
        ----------
        risk : {"consistency", "gap", "zero-bounded gap"}
            "consistency" compares with the full model's outputs; a gap is the difference between
            both losses against labels. Logit maps are compared at the images' size, as `collect`
            does without labels, and for a gap at the labels' size.
        labels : (m,), optional
            Labels of the audited requests, for a gap; negative ones are missing.

        Returns
        -------
        losses
            NaN if a needed label is missing; a 0-1 gap is 0 without a label if both answers agree.
        """
        kind = checks.choice("risk", risk, ["consistency", "gap", "zero-bounded gap"])
        named, both = LOSSES.choose(loss), [self.outputs, self.full_outputs]
        if kind == "consistency":
            return self._inconsistencies(named)
        if labels is None:
            raise ValueError("`labels` must be given for a gap: it compares losses against labels.")
        truth = torch.as_tensor(labels)
        against = label_losses(named, both, truth)
        gaps = _array(against[:, 0] - against[:, 1])
        if truth.ndim == 1 and not truth.is_floating_point():
            gaps[_array(truth < 0).astype(bool) & self._differ(named)] = np.nan
        return gaps if kind == "gap" else np.maximum(gaps, 0.0)

    def _inconsistencies(self, loss: Loss) -> NDArray[np.float64]:
        both = [self.outputs, self.full_outputs]
        if loss in PIXEL_LOSSES:
            found = image_losses(both, None, self.size, [loss.name])
            return _array(found[f"inconsistencies/{loss.name}"][:, 0])
        return _array(loss.function("tensors.against_last")(both)[:, 0])

    def _differ(self, loss: Loss) -> NDArray[np.bool_]:
        """Return where the two answers' losses may differ for some label."""
        if loss.of != "prediction" or loss.on_tensors().against_last is None:
            return np.ones(len(self.ids), bool)
        differ: NDArray[np.bool_] = self.losses("consistency", loss) > 0
        return differ


@dataclass(frozen=True)
class _ChosenRequests:
    """Requests of a batch chosen for an audit, with copies of their inputs.

    Only tensors as long as the batch are indexed: others, such as a scale, apply to all requests.
    """

    ids: tuple[str, ...]
    rows: Tensor
    leaves: list[Any]
    by_request: list[bool]
    spec: pytree.TreeSpec
    size: tuple[int, int] | None

    @classmethod
    def of(cls, batch: Any, n: int, ids: tuple[str, ...], rows: Tensor) -> "_ChosenRequests":
        """Return some rows of a batch of n requests."""
        leaves, spec = pytree.tree_flatten(batch)
        by_request = [
            isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == n for leaf in leaves
        ]
        whole = cls(ids, rows, leaves, by_request, spec, image_size(batch))
        return replace(whole, leaves=whole._cut(rows) if len(ids) else [])

    def some(self, keep: Tensor) -> "_ChosenRequests":
        """Return those of these requests where `keep` is true."""
        index = keep.nonzero()[:, 0]
        ids, rows = tuple(self.ids[k] for k in index.tolist()), self.rows[index]
        return replace(self, ids=ids, rows=rows, leaves=self._cut(index))

    def inputs(self, index: Tensor) -> Any:
        """Return the inputs of some of these requests."""
        return pytree.tree_unflatten(self._cut(index), self.spec)

    def _cut(self, index: Tensor) -> list[Any]:
        pairs = zip(self.leaves, self.by_request, strict=True)
        return [leaf.index_select(0, index) if cut else leaf for leaf, cut in pairs]


class Auditor:
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
        still served, and there is one warning. A missing loss counts as the lowest possible one
        (see `RequestOrder`): the guarantee holds, but the alarm is weaker.

    Raises
    ------
    ValueError
        If the monitor watches a risk that needs labels, an unknown loss, or a loss whose range
        differs from the one audits compute: a record made with `label="argmax"` or `"sample"`
        promises another Brier loss.
    """

    def __init__(
        self,
        rate: float,
        monitor: Monitor | None = None,
        *,
        seed: int | np.random.Generator | None = None,
    ) -> None:
        self.rate = checks.between("audit", rate, 0.0, np.nextafter(1.0, 2.0))
        self.order = None if monitor is None else RequestOrder(monitor)
        self.loss = None if monitor is None else _consistency_loss(monitor)
        self.requests = 0
        self.failed = 0
        self._rng = np.random.default_rng(seed)
        self._lock = threading.Lock()  # threads take request numbers and random draws in turn

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
        if (found.risk, found.loss, found.epsilon) not in [
            (each.risk, each.loss, each.epsilon)
            for each in certificate.promises
            if each.above is None
        ]:
            promises = ", ".join(
                f"{p.risk} of {p.loss} ≤ {p.epsilon:g}" for p in certificate.promises
            )
            raise ValueError(
                f"`monitor` must watch what the policy promises ({promises}), but it watches"
                f" {found.risk} of {found.loss} ≤ {found.epsilon:g}: make it with"
                " Monitor.from_policy, or add `out.audit.losses(...)` to it yourself."
            )
        if certificate.unit == "groups":
            each = "one mean of `out.audit.losses(...)` per group"
            if certificate.average == "sample":
                each = (
                    "Σℓ/M + ε (1 − m/M) per group, for its m losses of `out.audit.losses(...)` and"
                    f" M = {certificate.max_group_size}"
                )
            raise ValueError(
                "`monitor` must not be fed by audits if the policy was calibrated by groups, as"
                f" they see single requests: add {each} to it yourself."
            )

    def run(
        self,
        fast: "EarlyExit",
        batch: Any,
        answer: Callable[[Any], ExitOutput],
        ids: Sequence[str] | None = None,
    ) -> ExitOutput:
        """Return the answer to a batch, with an audit of some of its requests."""
        chosen = self._choose(batch, ids)
        try:
            return self._with_audit(fast, answer(batch), chosen)
        except BaseException:  # answering failed: a failed audit alone does not raise
            self._give_up(chosen)
            raise

    def follow(
        self,
        fast: "EarlyExit",
        batches: Iterable[Any],
        answer: Callable[[Iterator[Any]], Iterator[ExitOutput]],
    ) -> Iterator[ExitOutput]:
        """Yield the answers to many batches, in order but delayed, with some requests audited."""
        waiting: deque[_ChosenRequests] = deque()

        def noted() -> Iterator[Any]:
            for batch in batches:
                waiting.append(self._choose(batch))
                yield batch

        try:
            for out in answer(noted()):
                with fast.context(out.raw):
                    audited = self._with_audit(fast, out, waiting[0])
                waiting.popleft()
                yield audited
        finally:  # if stopped early, the waiting requests will not be answered
            for chosen in waiting:
                self._give_up(chosen)

    def _choose(self, batch: Any, ids: Sequence[str] | None = None) -> _ChosenRequests:
        """Choose some requests of a batch at random, before they are run."""
        n, device = batch_size(batch), device_of(batch)
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
            where = torch.from_numpy(rows).to(device)
            names = request_ids(n) if given is None else given  # in turn, so that they ascend
            chosen = _ChosenRequests.of(batch, n, tuple(names[k] for k in rows.tolist()), where)
            self.requests += n
            if self.order is not None:
                for request in chosen.ids:
                    self.order.expect(request)
        return chosen

    def _with_audit(
        self, fast: "EarlyExit", out: ExitOutput, chosen: _ChosenRequests
    ) -> ExitOutput:
        """Return an answer with its audit; if the audit fails, the answer is still returned."""
        unanswered = chosen.ids[:0]
        try:
            if out.on_invalid == "mark":
                valid = ~out.invalid[chosen.rows]
                invalid, chosen = chosen.some(~valid), chosen.some(valid)
                unanswered = invalid.ids
                self._give_up(invalid)
            if len(chosen.ids) == 0:
                return replace(out, audit=_empty_audit(out, chosen, unanswered))
            answered = rows_of(out.outputs, chosen.rows)
            exits = out.exits[chosen.rows]
            full = _full_outputs(fast, chosen, exits, answered)
            ids, rows = chosen.ids, chosen.rows
            audit = Audit(ids, rows, exits, answered, full, chosen.size, unanswered)
            self._fold(audit)
        except Exception as error:
            self._failed(chosen, error)
            audit = _empty_audit(out, chosen, unanswered + chosen.ids)
        return replace(out, audit=audit)

    def _failed(self, chosen: _ChosenRequests, error: Exception) -> None:
        """Count failed audits and warn the first time."""
        self._give_up(chosen)
        with self._lock:
            first = self.failed == 0
            self.failed += len(chosen.ids)
        if first:
            warnings.warn(
                f"The audit of {len(chosen.ids)} requests failed ({type(error).__name__}: {error})."
                " They were answered, but their losses are missing. This warning appears once;"
                " `failed` of the Auditor counts all such requests.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _fold(self, audit: Audit) -> None:
        if self.order is None or self.loss is None:
            return
        losses = audit.losses("consistency", self.loss).tolist()
        with self._lock:
            for request, loss in zip(audit.ids, losses, strict=True):
                self.order.arrive(request, loss)

    def _give_up(self, chosen: _ChosenRequests) -> None:
        """Stop waiting for requests whose losses will not arrive."""
        if self.order is None:
            return
        with self._lock:
            for request in chosen.ids:
                if self.order.waits_for(request):
                    self.order.give_up(request)


def _empty_audit(out: ExitOutput, chosen: _ChosenRequests, failed: tuple[str, ...]) -> Audit:
    """Return an audit without requests, and the ids of those whose audit failed."""
    none = chosen.rows[:0]
    empty = pytree.tree_map_only(Tensor, lambda leaf: leaf[:0] if leaf.ndim else leaf, out.raw)
    return Audit((), none, none, empty, empty, chosen.size, failed)


def _full_outputs(fast: "EarlyExit", chosen: _ChosenRequests, exits: Tensor, answered: Any) -> Any:
    """Return the last exit's outputs, reusing the answers of requests that got there."""
    last = fast.model.n_exits - 1
    early = (exits < last).nonzero()[:, 0]
    if len(early) == 0:
        return answered
    state = fast.model.begin(chosen.inputs(early))
    for k in range(last + 1):
        state = fast.stage(k, state)
    output = plain_output(fast.answer(last, state, len(early)))
    refuse_broken(output, None, last, chosen.rows[early])
    if len(early) == len(exits):
        return output
    return pytree.tree_map(
        lambda before, now: (
            before.index_copy(0, early, now.to(before.dtype)) if isinstance(now, Tensor) else now
        ),
        answered,
        output,
    )


def _consistency_loss(monitor: Monitor) -> Loss:
    if monitor.risk != "consistency" or monitor.loss is None:
        raise ValueError(
            "`monitor` must watch a consistency risk to be fed by audits, but it watches"
            f" {monitor.risk or 'an unnamed risk'}: gaps need labels, so add"
            " `out.audit.losses(...)` through a RequestOrder when the labels arrive."
        )
    loss = LOSSES.choose(monitor.loss)
    loss.function("tensors.against_last")
    expected, found = loss.range, monitor.loss_range
    if (found.low, found.high) != (expected.low, expected.high):
        raise ValueError(
            f"`monitor` must watch losses in [{expected.low:g}, {expected.high:g}], as audits"
            f" compute {loss.name}, but its losses are in [{found.low:g}, {found.high:g}]: a record"
            " made with label='sample' or 'argmax' promises a loss that audits do not compute."
            " Make the record with label='expected', or add losses of your own."
        )
    return loss


def _array(losses: Tensor) -> NDArray[np.float64]:
    array: NDArray[np.float64] = losses.double().cpu().numpy()
    return array
