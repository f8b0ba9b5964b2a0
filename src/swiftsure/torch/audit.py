"""Audits: a random share of requests is also run in full, to know what early exits cost."""

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from swiftsure import checks
from swiftsure.losses import LOSSES, resolve_loss
from swiftsure.monitor import Monitor, RequestOrder
from swiftsure.policy import Policy
from swiftsure.torch.losses import TENSOR_LOSSES, TensorLoss
from swiftsure.torch.results import ExitOutput, broken_rows, refuse_broken
from swiftsure.torch.segmentation import image_losses, image_size
from swiftsure.torch.staged import batch_size, device_of, plain_output, rows_of

if TYPE_CHECKING:
    from swiftsure.torch.runtime import EarlyExit

__all__ = ["Audit", "Auditor"]


@dataclass(frozen=True)
class Audit:
    """What the full model says to some requests of a batch, beside what was answered.

    Attributes
    ----------
    ids : (m,)
        Numbers of the requests, counted over all batches, audited or not; ascending.
    rows : (m,)
        Where they are in the batch.
    exits : (m,)
        Where they left. Requests that ran in full anyway are audited as often as the others.
    outputs, full_outputs
        What was answered, and what the last exit says, with the samples first.
    size : (height, width), optional
        Of the images that went in, where maps of logits are compared.
    failed : (k,)
        Numbers of requests that were chosen, but whose audit failed: either all of a batch, or
        none. Their losses are missing: `expect` and `give_up` them in a `RequestOrder`.
    """

    ids: Tensor
    rows: Tensor
    exits: Tensor
    outputs: Any
    full_outputs: Any
    size: tuple[int, int] | None = None
    failed: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))

    def losses(
        self, risk: str, loss: str | TensorLoss, labels: Tensor | None = None
    ) -> NDArray[np.float64]:
        """Return the losses to fold into a monitor, unweighted, (m,).

        Parameters
        ----------
        risk : {"consistency", "gap", "zero-bounded gap"}
            Against the full model's outputs, or the difference of both losses against labels. Maps
            of logits are compared at the size of the images, as `collect` does without labels, and
            for a gap at that of the labels.
        labels : (m,), optional
            Of the audited requests, for a gap; negative ones are missing.

        Returns
        -------
        losses
            NaN where a label is missing and matters: a 0-1 gap is 0 where both answers agree.
        """
        kind = checks.choice("risk", risk, ["consistency", "gap", "zero-bounded gap"])
        named, both = resolve_loss(loss, TENSOR_LOSSES), [self.outputs, self.full_outputs]
        if kind == "consistency":
            return self._inconsistencies(named)
        if labels is None:
            raise ValueError("`labels` must be given for a gap, which compares losses.")
        truth = torch.as_tensor(labels)
        against = named.of_labels(both, truth)
        if against is None:
            raise ValueError(f"`loss` {named.name!r} does not compare with labels.")
        gaps = _array(against[:, 0] - against[:, 1])
        if truth.ndim == 1 and not truth.is_floating_point():
            gaps[_array(truth < 0).astype(bool) & self._differ(named)] = np.nan
        return gaps if kind == "gap" else np.maximum(gaps, 0.0)

    def _inconsistencies(self, loss: TensorLoss) -> NDArray[np.float64]:
        both = [self.outputs, self.full_outputs]
        if loss.of_images:
            found = image_losses(both, None, self.size, [loss.name])
            return _array(found[f"inconsistencies/{loss.name}"][:, 0])
        if loss.against_last is None:
            raise ValueError(f"`loss` {loss.name!r} does not compare with the last exit.")
        return _array(loss.against_last(both)[:, 0])

    def _differ(self, loss: TensorLoss) -> NDArray[np.bool_]:
        """Return where both answers may have different losses, whatever the label."""
        of_predictions = loss.name in LOSSES and LOSSES[loss.name].of == "prediction"
        if not of_predictions or loss.against_last is None:
            return np.ones(len(self.ids), bool)
        differ: NDArray[np.bool_] = self.losses("consistency", loss) > 0
        return differ


@dataclass(frozen=True)
class _Chosen:
    """Requests of a batch that are to be audited, with inputs of their own.

    Only tensors as long as the batch are cut: others, such as a scale, are of all requests.
    """

    ids: NDArray[np.int64]
    rows: Tensor
    leaves: list[Any]
    by_request: list[bool]
    spec: pytree.TreeSpec
    size: tuple[int, int] | None

    @classmethod
    def of(cls, batch: Any, n: int, ids: NDArray[np.int64], rows: Tensor) -> "_Chosen":
        """Take some rows of a batch of n."""
        leaves, spec = pytree.tree_flatten(batch)
        by_request = [
            isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == n for leaf in leaves
        ]
        whole = cls(ids, rows, leaves, by_request, spec, image_size(batch))
        return replace(whole, leaves=whole._cut(rows) if len(ids) else [])

    def inputs(self, index: Tensor) -> Any:
        """Return the inputs of some of these requests."""
        return pytree.tree_unflatten(self._cut(index), self.spec)

    def _cut(self, index: Tensor) -> list[Any]:
        pairs = zip(self.leaves, self.by_request, strict=True)
        return [leaf.index_select(0, index) if cut else leaf for leaf, cut in pairs]


class Auditor:
    """Chooses requests at random, runs them in full, and hands the losses to a monitor.

    Each request is chosen with the same probability, by coins that know nothing of it: the mean
    loss of audited requests is then the risk, and no weights are needed.

    Parameters
    ----------
    rate : float
        Probability that a request is audited, in (0, 1].
    monitor : Monitor, optional
        Of a consistency risk: losses are folded in request order as audits are done. Gaps need
        labels: fold `Audit.losses` through a `RequestOrder` when these come.
    seed : int or Generator, optional
        By default the coins come from the operating system, so that no requester can foresee them.
    first_id : int
        Number of the first request, to go on counting after a restart.

    Attributes
    ----------
    failed : int
        How many audits failed, as when the full model runs out of memory. The answer is served all
        the same, and there is a warning once. A loss that is missing so counts as the lowest
        possible one (see `RequestOrder`): the guarantee holds, and the alarm is weaker.

    Raises
    ------
    ValueError
        If the monitor is of a risk that needs labels, of an unknown loss, or of a loss with another
        range than audits compute: a record that was made with `label="argmax"` or `"sample"`
        promises another Brier loss.
    """

    def __init__(
        self,
        rate: float,
        monitor: Monitor | None = None,
        *,
        seed: int | np.random.Generator | None = None,
        first_id: int = 0,
    ) -> None:
        self.rate = checks.between("audit", rate, 0.0, np.nextafter(1.0, 2.0))
        self.order = None if monitor is None else RequestOrder(monitor)
        self.loss = None if monitor is None else _consistency_loss(monitor)
        self.requests = checks.count("first_id", first_id, least=0)
        self.failed = 0
        self._coins = np.random.default_rng(seed)
        self._lock = threading.Lock()  # batches of several threads get numbers and coins in turn

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be copied or pickled, as a part of an `EarlyExit` too."""
        raise TypeError(
            "An Auditor cannot be copied or pickled: each copy would number the same requests and"
            " feed a monitor of its own. Copy the model and the policy, and make a new EarlyExit"
            " with `audit=Auditor(rate, monitor, first_id=...)`."
        )

    def refuse_policy(self, policy: Policy) -> None:
        """Raise if the monitor is not of what this policy promises, or audits cannot feed it."""
        if self.order is None:
            return
        found = self.order.monitor
        certificate = policy.certificate
        if (found.risk, found.loss, found.epsilon) not in [
            (each.risk, each.loss, each.epsilon) for each in certificate.promises
        ]:
            promises = ", ".join(
                f"{p.risk} of {p.loss} ≤ {p.epsilon:g}" for p in certificate.promises
            )
            raise ValueError(
                f"`monitor` must watch what the policy promises ({promises}), but it watches"
                f" {found.risk} of {found.loss} ≤ {found.epsilon:g}: make it with"
                " Monitor.from_policy, or fold `out.audit.losses(...)` into it yourself."
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
                f" they see single requests: fold {each} into it yourself."
            )

    def run(self, fast: "EarlyExit", batch: Any, answer: Callable[[Any], ExitOutput]) -> ExitOutput:
        """Answer a batch, and audit some of it."""
        chosen = self._choose(batch)
        try:
            return self._audited(fast, answer(batch), chosen)
        except BaseException:  # there is no answer; an audit that fails alone is no error
            self._give_up(chosen)
            raise

    def follow(
        self,
        fast: "EarlyExit",
        batches: Iterable[Any],
        answer: Callable[[Iterator[Any]], Iterator[ExitOutput]],
    ) -> Iterator[ExitOutput]:
        """Answer many batches, whose results come later but in order, and audit some of them."""
        waiting: deque[_Chosen] = deque()

        def noted() -> Iterator[Any]:
            for batch in batches:
                waiting.append(self._choose(batch))
                yield batch

        try:
            for out in answer(noted()):
                with fast.context(out.raw):
                    audited = self._audited(fast, out, waiting[0])
                waiting.popleft()
                yield audited
        finally:  # broken off: these will not be answered
            for chosen in waiting:
                self._give_up(chosen)

    def _choose(self, batch: Any) -> _Chosen:
        """Number the requests of a batch, and choose some before anything is known of them."""
        n, device = batch_size(batch), device_of(batch)
        with self._lock:
            rows = np.flatnonzero(self._coins.random(n) < self.rate)
            # Taken before the batch is run: a model may write over its inputs. And before they are
            # expected: were this to fail, the others would wait for them for ever.
            where = torch.from_numpy(rows).to(device)
            chosen = _Chosen.of(batch, n, self.requests + rows, where)
            self.requests += n
            if self.order is not None:
                for request in chosen.ids.tolist():
                    self.order.expect(request)
        return chosen

    def _audited(self, fast: "EarlyExit", out: ExitOutput, chosen: _Chosen) -> ExitOutput:
        """Return an answer with its audit; one that fails does not take the answer with it."""
        if len(chosen.ids) == 0:
            return replace(out, audit=_empty_audit(out, chosen))
        try:
            answered = rows_of(out.outputs, chosen.rows)
            exits = out.exits[chosen.rows]
            full = _full_outputs(fast, chosen, exits, answered)
            ids = torch.from_numpy(chosen.ids)
            audit = Audit(ids, chosen.rows, exits, answered, full, chosen.size)
            self._fold(audit)
        except Exception as error:
            self._failed(chosen, error)
            audit = _empty_audit(out, chosen)
        return replace(out, audit=audit)

    def _failed(self, chosen: _Chosen, error: Exception) -> None:
        """Count audits that failed, and say so the first time."""
        self._give_up(chosen)
        with self._lock:
            first = self.failed == 0
            self.failed += len(chosen.ids)
        if first:
            warnings.warn(
                f"The audit of {len(chosen.ids)} requests failed ({type(error).__name__}: {error})."
                " They were answered, but their losses are missing; `failed` of the Auditor counts"
                " such requests, and this is said once.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _fold(self, audit: Audit) -> None:
        if self.order is None or self.loss is None:
            return
        losses = audit.losses("consistency", self.loss).tolist()
        with self._lock:
            for request, loss in zip(audit.ids.tolist(), losses, strict=True):
                self.order.arrive(request, loss)

    def _give_up(self, chosen: _Chosen) -> None:
        """Stop waiting for requests whose losses will not come."""
        if self.order is None:
            return
        with self._lock:
            for request in chosen.ids.tolist():
                if self.order.waits_for(request):
                    self.order.give_up(request)


def _empty_audit(out: ExitOutput, chosen: _Chosen) -> Audit:
    """Return an audit of no request; those that were chosen have failed."""
    none = chosen.rows[:0]
    ids = torch.from_numpy(chosen.ids)
    empty = pytree.tree_map_only(Tensor, lambda leaf: leaf[:0] if leaf.ndim else leaf, out.raw)
    return Audit(ids[:0], none, none, empty, empty, chosen.size, failed=ids)


def _full_outputs(fast: "EarlyExit", chosen: _Chosen, exits: Tensor, answered: Any) -> Any:
    """Return the last exit's outputs; of requests that got there, what they were answered."""
    last = fast.model.n_exits - 1
    early = (exits < last).nonzero()[:, 0]
    if len(early) == 0:
        return answered
    state = fast.model.begin(chosen.inputs(early))
    for k in range(last + 1):
        state = fast.stage(k, state)
    output = plain_output(fast.answer(last, state, len(early)))
    broken = broken_rows(output)
    if broken is not None and broken.any():
        row = int(broken.nonzero()[0, 0])
        refuse_broken(output, row, last, int(chosen.rows[early[row]]))
    if len(early) == len(exits):
        return output
    return pytree.tree_map(
        lambda before, now: (
            before.index_copy(0, early, now.to(before.dtype)) if isinstance(now, Tensor) else now
        ),
        answered,
        output,
    )


def _consistency_loss(monitor: Monitor) -> TensorLoss:
    if monitor.risk != "consistency" or monitor.loss is None:
        raise ValueError(
            "`monitor` must watch a consistency risk to be fed by audits, but it watches"
            f" {monitor.risk or 'a risk without a name'}: gaps need labels, so fold"
            " `out.audit.losses(...)` through a RequestOrder when these come."
        )
    loss = resolve_loss(monitor.loss, TENSOR_LOSSES)
    expected = LOSSES[loss.name].range if loss.name in LOSSES else loss.range
    found = monitor.loss_range
    if expected is not None and (found.low, found.high) != (expected.low, expected.high):
        raise ValueError(
            f"`monitor` must watch losses in [{expected.low:g}, {expected.high:g}], as audits"
            f" compute {loss.name}, but its are in [{found.low:g}, {found.high:g}]: a record made"
            " with label='sample' or 'argmax' promises another loss, which audits do not know."
            " Make the record with label='expected', or fold losses of your own."
        )
    return loss


def _array(losses: Tensor) -> NDArray[np.float64]:
    array: NDArray[np.float64] = losses.double().cpu().numpy()
    return array
