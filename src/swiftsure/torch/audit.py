"""Audits: a random share of requests is also run in full, to know what early exits cost."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from swiftsure import checks
from swiftsure.losses import LOSSES
from swiftsure.monitor import Monitor, RequestOrder
from swiftsure.torch.losses import TensorLoss, resolve
from swiftsure.torch.results import ExitOutput, broken_rows, refuse_broken
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
    """

    ids: Tensor
    rows: Tensor
    exits: Tensor
    outputs: Any
    full_outputs: Any

    def losses(
        self, risk: str, loss: str | TensorLoss, labels: Tensor | None = None
    ) -> NDArray[np.float64]:
        """Return the losses to fold into a monitor, unweighted, (m,).

        Parameters
        ----------
        risk : {"consistency", "gap", "zero-bounded gap"}
            Against the full model's outputs, or the difference of both losses against labels.
        labels : (m,), optional
            Of the audited requests, for a gap; negative ones are missing.

        Returns
        -------
        losses
            NaN where a label is missing and matters: a 0-1 gap is 0 where both answers agree.
        """
        kind = checks.known("risk", risk, ["consistency", "gap", "zero-bounded gap"])
        named, both = resolve(loss), [self.outputs, self.full_outputs]
        if kind == "consistency":
            if named.against_last is None:
                raise ValueError(f"`loss` {named.name!r} does not compare with the last exit.")
            return _array(named.against_last(both)[:, 0])
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

    def _differ(self, loss: TensorLoss) -> NDArray[np.bool_]:
        """Return where both answers may have different losses, whatever the label."""
        of_predictions = loss.name in LOSSES and LOSSES[loss.name].of == "prediction"
        if not of_predictions or loss.against_last is None:
            return np.ones(len(self.ids), bool)
        differ: NDArray[np.bool_] = self.losses("consistency", loss) > 0
        return differ


@dataclass(frozen=True)
class _Chosen:
    """Requests of a batch that are to be audited, with inputs of their own."""

    ids: NDArray[np.int64]
    rows: Tensor
    inputs: Any


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

    Raises
    ------
    ValueError
        If the monitor is of a risk that needs labels, or of an unknown loss.
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
        self._coins = np.random.default_rng(seed)
        self._lock = threading.Lock()  # batches of several threads get numbers and coins in turn

    def run(self, fast: "EarlyExit", batch: Any, answer: Callable[[Any], ExitOutput]) -> ExitOutput:
        """Answer a batch, and audit some of it."""
        chosen = self._choose(batch)
        try:
            return self._audited(fast, answer(batch), chosen)
        except BaseException:
            self._forsake(chosen)
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
                self._forsake(chosen)

    def _choose(self, batch: Any) -> _Chosen:
        """Number the requests of a batch, and choose some before anything is known of them."""
        n = batch_size(batch)
        with self._lock:
            rows = np.flatnonzero(self._coins.random(n) < self.rate)
            ids = self.requests + rows
            self.requests += n
            if self.order is not None:
                for request in ids.tolist():
                    self.order.expect(request)
        where = torch.from_numpy(rows).to(device_of(batch))
        # Taken before the batch is run: a model may write over its inputs.
        return _Chosen(ids, where, rows_of(batch, where) if len(rows) else None)

    def _audited(self, fast: "EarlyExit", out: ExitOutput, chosen: _Chosen) -> ExitOutput:
        if len(chosen.ids) == 0:
            nothing = rows_of(out.raw, chosen.rows)
            audit = Audit(torch.from_numpy(chosen.ids), chosen.rows, chosen.rows, nothing, nothing)
            return replace(out, audit=audit)
        answered = rows_of(out.outputs, chosen.rows)
        exits = out.exits[chosen.rows]
        full = _full_outputs(fast, chosen, exits, answered)
        audit = Audit(torch.from_numpy(chosen.ids), chosen.rows, exits, answered, full)
        self._fold(audit)
        return replace(out, audit=audit)

    def _fold(self, audit: Audit) -> None:
        if self.order is None or self.loss is None:
            return
        losses = audit.losses("consistency", self.loss).tolist()
        with self._lock:
            for request, loss in zip(audit.ids.tolist(), losses, strict=True):
                self.order.arrive(request, loss)

    def _forsake(self, chosen: _Chosen) -> None:
        """Wait no longer for requests that could not be answered."""
        if self.order is None:
            return
        with self._lock:
            for request in chosen.ids.tolist():
                self.order.give_up(request)


def _full_outputs(fast: "EarlyExit", chosen: _Chosen, exits: Tensor, answered: Any) -> Any:
    """Return the last exit's outputs; of requests that got there, what they were answered."""
    last = fast.model.n_exits - 1
    early = (exits < last).nonzero()[:, 0]
    if len(early) == 0:
        return answered
    state = fast.model.begin(rows_of(chosen.inputs, early))
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
    return resolve(monitor.loss)


def _array(losses: Tensor) -> NDArray[np.float64]:
    array: NDArray[np.float64] = losses.double().cpu().numpy()
    return array
