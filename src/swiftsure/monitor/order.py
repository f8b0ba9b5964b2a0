"""RequestOrder: adds late losses to a monitor in request order."""

from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import Any, Self, TypeVar, cast

from pydantic import Field, model_validator

from swiftsure._lib import checks
from swiftsure.monitor.ids import check_request_id
from swiftsure.monitor.risk import Monitor
from swiftsure.monitor.state import Section

__all__ = ["OrderState", "RequestId", "RequestOrder"]

RequestId = str | int
"""A string, or a number that ascends."""

Method = TypeVar("Method", bound=Callable[..., Any])

MISSING = ("lowest", "skip")

REMEMBERED = 100_000
"""How many given-up requests are remembered; limited so that state files stay below 2 MB."""


REMEMBERED_DONE = 20_000
"""How many requests with string ids are remembered after their loss was added."""


class OrderState(Section):
    """The state of a request order, without its monitor."""

    last: int | None = Field(ge=0)
    given_up: int = Field(ge=0)
    too_late: int = Field(ge=0)
    line: tuple[tuple[RequestId, float | None], ...]
    patience: int | None = Field(default=None, ge=1)
    missing: str | None = None
    """None in states of earlier versions, which do not store the patience either."""
    given_up_requests: tuple[RequestId, ...] = ()
    """Requests that were given up and whose loss has not come since, in the order of giving up.

    Only the last `REMEMBERED`; empty in states of earlier versions.
    """
    done: tuple[str, ...] = ()
    """The last `REMEMBERED_DONE` string ids whose loss was added."""
    any_id: bool = False
    """Whether a request had a string id."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        """Refuse an impossible state: restoring it would lose or misplace losses."""
        last = -1 if self.last is None else self.last
        line, given_up = dict(self.line), set(self.given_up_requests)
        numbers = [request for request, _ in self.line if isinstance(request, int)]
        seen = {each for each in given_up if isinstance(each, int)}.union(numbers)
        if numbers != sorted(set(numbers)) or (seen and not 0 <= min(seen) <= max(seen) <= last):
            raise ValueError("requests must be ascending, and none above the last one")
        if len(line) < len(self.line) or len({*self.done}) < len(self.done):
            raise ValueError("a request is there twice")
        if not line.keys().isdisjoint(self.done):
            raise ValueError("a request whose loss was added still waits")
        if len(given_up) != len(self.given_up_requests):
            raise ValueError("a request was given up twice")
        if any(line.get(request, 0.0) is None for request in given_up):
            raise ValueError("a request that was given up still waits for its loss")
        if self.too_late + len(given_up) > self.given_up:
            raise ValueError(
                f"{self.too_late:,} losses were left out as too late, but only {self.given_up:,}"
                " requests were given up: losses of other requests were left out too, which voids"
                " the guarantee"
            )
        return self


def _locked(method: Method) -> Method:
    """Run a method while holding the monitor's lock, so that threads may share an order."""

    @wraps(method)
    def run(order: "RequestOrder", *arguments: Any, **options: Any) -> Any:
        with order.monitor.lock:
            return method(order, *arguments, **options)

    return cast("Method", run)


class RequestOrder:
    """Adds losses to a monitor in request order, however late they arrive.

    The order matters: if wrong answers are reported sooner than right ones, the losses that have
    arrived so far are a biased sample, and adding them as they arrive may raise a false alarm. In
    request order each loss waits for those before it.

    Parameters
    ----------
    monitor : Monitor
    patience : int, optional
        How many later requests may wait for a loss before it is given up; by default no limit.
    missing : {"lowest", "skip"}
        What to add for a loss that was given up. "lowest": the lowest possible loss, which always
        keeps the guarantee but weakens the alarm. "skip": nothing, which keeps the guarantee only
        if whether a loss is missing does not depend on its size.

    Notes
    -----
    Request ids are strings, such as those of `request_ids`, or ascending whole numbers. The request
    order is the order in which they are first seen, by `expect` or `arrive`. Requests may be left
    out if that does not depend on the losses, for example if requests are sampled at random. A loss
    known to be missing is not such a gap: `expect` its request, then `give_up`.

    A request whose loss comes after later requests must be announced with `expect` when it is made:
    otherwise the losses added before it are a biased sample. With numbers this is noticed, and the
    loss is an error; a string that was not announced counts as a new request. The only late loss
    that is accepted is the first one for a request that was given up. It is left out and counted in
    `too_late`.

    Memory holds the waiting losses, the last 100,000 requests that were given up and whose loss has
    not arrived, and the last 20,000 strings whose loss was added. A late loss for a number given up
    before those is also an error, because it cannot be told apart from a second loss. A string that
    is used again after so many others counts as a new request.

    Examples
    --------
    >>> order = RequestOrder(Monitor(epsilon=0.05))
    >>> for request in (1, 2, 3):
    ...     order.expect(request)
    >>> order.arrive(2, 0.0), order.monitor.n  # waits for request 1
    (False, 0)
    >>> order.arrive(1, 1.0), order.monitor.n, order.waiting
    (False, 2, 1)
    """

    def __init__(
        self, monitor: Monitor, *, patience: int | None = None, missing: str = "lowest"
    ) -> None:
        if not isinstance(monitor, Monitor):
            raise TypeError(f"`monitor` must be a Monitor, but got {type(monitor).__name__}.")
        self.monitor = monitor
        self.patience = None if patience is None else checks.count("patience", patience)
        self.missing = checks.choice("missing", missing, MISSING)
        self.given_up = 0
        self.too_late = 0
        self._last: int | None = None
        # The loss of each waiting request; None until it arrives.
        self._line: OrderedDict[RequestId, float | None] = OrderedDict()
        # Requests that were given up and whose loss has not come since, oldest first.
        self._given_up: OrderedDict[RequestId, None] = OrderedDict()
        # String ids whose loss was added, oldest first.
        self._done: OrderedDict[str, None] = OrderedDict()
        self._any_id = False

    @property
    def waiting(self) -> int:
        """How many requests have losses that were not added yet."""
        return len(self._line)

    @property
    def in_use(self) -> bool:
        """Whether any request was announced or has a loss."""
        return self._last is not None or self._any_id

    @_locked
    def expect(self, request: RequestId) -> None:
        """Announce a request whose loss will come later.

        Raises
        ------
        ValueError
            If the request was seen before, or is a number that is not above all earlier ones.
        """
        self._enqueue(_request_id(request), None)
        self._release()

    @_locked
    def arrive(self, request: RequestId, loss: float) -> bool:
        """Add the loss of a waiting or new request; return whether there is an alarm.

        The first loss for a request that was given up is left out and counted in `too_late`.

        Raises
        ------
        ValueError
            If the loss is NaN or outside its range, if the request already has its loss, or if it
            is a number that was not announced before a later one came. Each voids the guarantee, so
            nothing is added.
        """
        number = _request_id(request)
        value = self.monitor.accepted(loss)
        if number in self._given_up:
            del self._given_up[number]
            if isinstance(number, str) and number not in self._line:
                self._remember(number)
            self.too_late += 1
            return self.monitor.alarm
        if number not in self._line:
            self._enqueue(number, value)
        elif self._line[number] is not None:
            raise self._out_of_order(number)
        else:
            self._line[number] = value
        self._release()
        return self.monitor.alarm

    def waits_for(self, request: RequestId) -> bool:
        """Return whether the loss of a request is still to come."""
        return self._line.get(request, 0.0) is None

    @_locked
    def give_up(self, request: RequestId) -> None:
        """Stop waiting for the loss of a request; nothing changes if it was given up already.

        Raises
        ------
        ValueError
            If the request is not waiting for its loss. One that was never announced would be
            skipped silently, whatever `missing` says: `expect` it first, when it is made.
        """
        number = _request_id(request)
        if number in self._given_up:
            return
        if not self.waits_for(number):
            raise ValueError(
                f"`request` must be one that waits for its loss, but got {number}, which was never"
                " announced with `expect`, or has its loss already (see `waits_for`)."
                f"{self._forgotten()}"
            )
        self._mark_given_up(number)
        self._release()

    def _enqueue(self, request: RequestId, loss: float | None) -> None:
        if isinstance(request, str):
            if request in self._line or request in self._done or request in self._given_up:
                raise self._out_of_order(request)
            self._any_id = True
        else:
            if self._last is not None and request <= self._last:
                raise self._out_of_order(request)
            self._last = request
        self._line[request] = loss

    def _release(self) -> None:
        """Add losses from the head of the queue; give up those that waited too long."""
        while self._line:
            request = next(iter(self._line))
            loss = self._line[request]
            if loss is None:
                if self.patience is None or len(self._line) <= self.patience:
                    return
                self._mark_given_up(request)
                continue
            del self._line[request]
            if isinstance(request, str) and request not in self._given_up:
                self._remember(request)
            self.monitor.update(loss)

    def _remember(self, request: str) -> None:
        """Remember a string whose loss came, so that a second one is noticed."""
        self._done[request] = None
        if len(self._done) > REMEMBERED_DONE:
            self._done.popitem(last=False)

    def _mark_given_up(self, request: RequestId) -> None:
        self.given_up += 1
        self._given_up[request] = None
        while len(self._given_up) > REMEMBERED:
            self._given_up.popitem(last=False)
        if self.missing == "skip":
            del self._line[request]
        else:
            self._line[request] = self.monitor.loss_range.low

    def _out_of_order(self, request: RequestId) -> ValueError:
        if isinstance(request, str):
            return ValueError(
                f"`request` must be new, or wait for its loss, but got {request!r}, which came"
                " before: each has one loss."
            )
        return ValueError(
            f"`request` must be above {self._last}, the last one, or wait for its loss, but got"
            f" {request}: it was not announced before later requests, or it came twice. Announce"
            " requests in the order in which they are made; each has one loss."
            f"{self._forgotten()}"
        )

    def _forgotten(self) -> str:
        """Return a hint that the request may be a given-up one that is no longer remembered."""
        n = self.given_up - self.too_late - len(self._given_up)
        if not n:
            return ""
        return (
            f" Or it is one of {n:,} requests that were given up but are not remembered (the last"
            f" {REMEMBERED:,} are; states of earlier versions remember none): then delete this late"
            " entry, which would be left out anyway."
        )

    @_locked
    def state(self) -> OrderState:
        """Return the state, without the monitor's."""
        return OrderState(
            last=self._last,
            given_up=self.given_up,
            too_late=self.too_late,
            line=tuple(self._line.items()),
            patience=self.patience,
            missing=self.missing,
            given_up_requests=tuple(self._given_up),
            done=tuple(self._done),
            any_id=self._any_id,
        )

    @_locked
    def restore(self, state: OrderState) -> None:
        """Restore a state.

        Raises
        ------
        ValueError
            If it was saved with another patience, or another rule for missing losses.
        """
        if state.missing is not None:
            self._refuse_other("patience", self.patience, state.patience)
            self._refuse_other("missing", self.missing, state.missing)
        self._last, self.given_up, self.too_late = state.last, state.given_up, state.too_late
        self._line = OrderedDict(state.line)
        self._given_up = OrderedDict.fromkeys(state.given_up_requests)
        self._done = OrderedDict.fromkeys(state.done)
        self._any_id = state.any_id

    @staticmethod
    def _refuse_other(name: str, wanted: object, kept: object) -> None:
        if wanted != kept:
            raise ValueError(
                f"`{name}` must be {kept!r}, as in the state, but got {wanted!r}: a rule that"
                " changes halfway may depend on the losses seen so far. Use another file."
            )


def _request_id(request: RequestId) -> RequestId:
    """Return a checked request id; without the check, True and 1.0 would match 1."""
    if isinstance(request, str):
        return check_request_id("request", request)
    return checks.count("request", request, least=0)
