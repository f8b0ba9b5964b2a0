"""RequestOrder: late losses, folded in the order of the requests."""

from collections import OrderedDict

from pydantic import Field

from swiftsure import checks
from swiftsure.monitor.risk import Monitor
from swiftsure.monitor.state import Section

__all__ = ["OrderState", "RequestOrder"]

MISSING = ("lowest", "skip")


class OrderState(Section):
    """Everything that a request order knows, but its monitor."""

    last: int | None
    given_up: int = Field(ge=0)
    too_late: int = Field(ge=0)
    line: tuple[tuple[int, float | None], ...]
    patience: int | None = None
    missing: str | None = None
    """None in a state that does not say, nor what the patience was."""


class RequestOrder:
    """Folds losses into a monitor in the order of the requests, however late they come.

    Why order matters: where wrong answers are reported sooner than right ones, the losses that have
    arrived so far are no fair sample, and folding them as they come may raise a false alarm though
    the risk is fine. In request order each loss waits for those before it.

    Parameters
    ----------
    monitor : Monitor
    patience : int, optional
        How many later requests a loss may keep waiting before it is given up; by default any.
    missing : {"lowest", "skip"}
        What to fold for a loss that was given up. "lowest": the lowest possible loss, which keeps
        the guarantee whatever the reason, and weakens the alarm. "skip": nothing, which keeps it
        only if whether a loss is missing does not depend on how large it is.

    Notes
    -----
    Requests have whole numbers that grow. Gaps between them are fine if they do not depend on the
    losses, such as requests that a coin did not choose. A loss that is known to be missing is no
    such gap: `expect` its request, then `give_up`. It holds the losses that wait, no more.

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
        self.monitor = monitor
        self.patience = None if patience is None else checks.count("patience", patience)
        self.missing = checks.known("missing", missing, MISSING)
        self.given_up = 0
        self.too_late = 0
        self._last: int | None = None
        # Each request with its loss, None while that is not known.
        self._line: OrderedDict[int, float | None] = OrderedDict()

    @property
    def waiting(self) -> int:
        """How many requests are not folded yet."""
        return len(self._line)

    @property
    def in_use(self) -> bool:
        """Whether any request was seen."""
        return self._last is not None

    def expect(self, request: int) -> None:
        """Note a request whose loss will come later."""
        self._stand_in_line(request, None)
        self._release()

    def arrive(self, request: int, loss: float) -> bool:
        """Take a loss, of a request that waits or of a new one; return whether there is an alarm.

        Raises
        ------
        ValueError
            If the loss is NaN or outside its range, or the request had its loss already.
        """
        value = self.monitor.accepted(loss)
        if request not in self._line:
            if self.given_up and self._last is not None and request <= self._last:
                self.too_late += 1  # its place in the order has passed
                return self.monitor.alarm
            self._stand_in_line(request, value)
        elif self._line[request] is not None:
            raise self._twice(request)
        else:
            self._line[request] = value
        self._release()
        return self.monitor.alarm

    def waits_for(self, request: int) -> bool:
        """Return whether the loss of a request is still to come."""
        return self._line.get(request, 0.0) is None

    def give_up(self, request: int) -> None:
        """Wait no longer for the loss of a request; one that does not wait for it is left alone."""
        if self.waits_for(request):
            self._forsake(request)
            self._release()

    def _stand_in_line(self, request: int, loss: float | None) -> None:
        checks.count("request", request, least=0)
        if self._last is not None and request <= self._last:
            raise self._twice(request)
        self._last = request
        self._line[request] = loss

    def _release(self) -> None:
        """Fold from the head of the line whatever is known, or is waited for too long."""
        while self._line:
            request = next(iter(self._line))
            loss = self._line[request]
            if loss is None:
                if self.patience is None or len(self._line) <= self.patience:
                    return
                self._forsake(request)
                continue
            del self._line[request]
            self.monitor.update(loss)

    def _forsake(self, request: int) -> None:
        self.given_up += 1
        if self.missing == "skip":
            del self._line[request]
        else:
            self._line[request] = self.monitor.loss_range.low

    def _twice(self, request: int) -> ValueError:
        return ValueError(
            f"`request` must be a new one, above {self._last}, or one that waits for its loss, but"
            f" got {request}: numbers grow with requests, and each has one loss."
        )

    def state(self) -> OrderState:
        """Return what it knows beside its monitor."""
        return OrderState(
            last=self._last,
            given_up=self.given_up,
            too_late=self.too_late,
            line=tuple(self._line.items()),
            patience=self.patience,
            missing=self.missing,
        )

    def restore(self, state: OrderState) -> None:
        """Go back to a state.

        Raises
        ------
        ValueError
            If it was kept with another patience, or another rule for missing losses.
        """
        if state.missing is not None:
            self._refuse_other("patience", self.patience, state.patience)
            self._refuse_other("missing", self.missing, state.missing)
        self._last, self.given_up, self.too_late = state.last, state.given_up, state.too_late
        self._line = OrderedDict(state.line)

    @staticmethod
    def _refuse_other(name: str, wanted: object, kept: object) -> None:
        if wanted != kept:
            raise ValueError(
                f"`{name}` must be {kept!r}, as in the state, but got {wanted!r}: a rule that"
                " changes on the way may depend on what was seen. Start anew with another file."
            )
