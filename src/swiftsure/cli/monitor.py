"""`swiftsure monitor`: raise an alarm when the risk in production exceeds the promise."""

import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from swiftsure.cli import options
from swiftsure.cli.options import optional
from swiftsure.cli.output import one_line, print_json, print_text

if TYPE_CHECKING:
    from swiftsure.certify.policy import Policy
    from swiftsure.monitor import Drift, Monitor, Watch

__all__ = ["monitor"]

ALPHA = 0.01
CHUNK = 1 << 20
PAUSE = 0.2
"""Seconds between reads of a followed file."""

SETTLE = 2.0
"""Seconds within which a line must be written, so that logs are folded in order of time."""

NO_GUARANTEE = "Warning, without a guarantee: "


def monitor(
    streams: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Files of JSON lines, or folders of such logs; - is standard input.",
            show_default="-",
        ),
    ] = None,
    policy: Annotated[Path | None, optional("The policy whose promise to watch.")] = None,
    risk: Annotated[str | None, optional("Risk of the promise, if there are several.")] = None,
    loss: Annotated[str | None, optional("Loss of the promise, if there are several.")] = None,
    epsilon: Annotated[float | None, optional("Without a policy: largest risk allowed.")] = None,
    low: Annotated[
        float | None, optional("Without a policy: lowest possible loss.", default="0")
    ] = None,
    high: Annotated[
        float | None, optional("Without a policy: largest possible loss.", default="1")
    ] = None,
    alpha: Annotated[
        float | None, optional("Probability of a false alarm, over all time.", default="0.01")
    ] = None,
    state: Annotated[Path | None, optional("State file: resume from it and save to it.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for more lines, until an alarm.")
    ] = False,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Read a new file, after log rotation.")
    ] = False,
    patience: Annotated[
        int | None, optional("How many later requests a late loss may hold up.", default="any")
    ] = None,
    missing: Annotated[
        str | None,
        optional("A loss that never arrives: count it as lowest, or skip it.", default="lowest"),
    ] = None,
    cost: Annotated[
        str | None, optional("The policy's cost that lines report.", default="exits")
    ] = None,
    record: Annotated[Path | None, optional("Calibration record, to compare confidences.")] = None,
    json: options.Json = False,
) -> None:
    r"""Watch losses in production; raise an alarm if the risk exceeds ε.

    Each line is {"loss": 0.0}, or a number. For late losses, write
    {"id": "a7"} at the request and {"id": "a7", "loss": 1} once it is
    known; they count in request order. Any line may add "exit", "cost"
    and "confidence", for warnings without a guarantee. Lines of several
    logs are ordered by "time", in seconds since 1970.

    A false alarm has probability at most α, however long it runs, if
    the mean of each loss, given those before it, is at most ε.
    The exit status is 1 after an alarm, or after a fault such as a loss
    outside its range or a line without a loss (none is skipped).

    [bold]Example[/bold]

        swiftsure monitor losses.jsonl --policy deployed.json \
            --alpha 0.01 --state monitor.json
    """
    if str(state) == "-":
        raise ValueError("`--state` must be a file, not standard output.")
    state = None if state is None else state.resolve()  # one state, whatever link leads to it
    with ExitStack() as stack:
        unwritable = _claim(state, stack)
        before = state if state is not None and state.exists() else None
        promised = _requested_monitor(policy, risk, loss, epsilon, (low, high), alpha, before)
        watch = _watch(promised, _drift(policy, cost, record), before, patience, missing)
        run = _Run(watch, state, unwritable)
        given = streams or [Path("-")]
        if len(given) > 1 or given[0].is_dir() or watch.logs.places:
            if from_start or Path("-") in given:
                raise ValueError(
                    "`streams` must be files if there are several, without --from-start: each log"
                    " is read once, and a new one needs a new name."
                )
            fault, cut = run.read_logs(given, follow=follow), False
        else:
            fault, cut = run.read(given[0], from_start=from_start, follow=follow)
        if fault is None and run.unsaved is None and not _has_losses(watch):
            names = ", ".join(map(str, given))
            raise ValueError(f"`streams` must hold at least one loss, but {names} holds none.")
        if fault is None and watch.mostly_unreadable:
            fault = (
                f"{watch.unreadable:,} of {watch.requests:,} lines could not be read, so the others"
                " say little about the risk. Check what writes the stream."
            )
        run.finish()
    shown = _show(watch, fault, cut, json)  # before any failure to save: an alarm must be seen
    if run.unsaved is not None:
        typer.echo(f"swiftsure: the state was not saved: {one_line(str(run.unsaved))}", err=True)
    if fault is not None or watch.monitor.alarm:
        raise typer.Exit(1)
    if run.replaced is not None:
        raise run.replaced
    if run.unsaved is not None or not shown:
        raise typer.Exit(2)


def _claim(state: Path | None, stack: ExitStack) -> Exception | None:
    """Lock the state for the whole run; return why it cannot be written to, if so.

    An alarm must be seen even if it cannot be saved, so this does not end the run.
    """
    from swiftsure._lib.files import LockedError, locked, writable

    if state is None:
        return None
    try:
        writable(state)
        # Unlike the short lock under which the state is written.
        stack.enter_context(locked(state.with_name(f".{state.name}.run")))
    except LockedError:
        raise
    except (OSError, ValueError) as error:
        if not state.parent.is_dir() or state.is_dir():
            raise  # a wrong name
        return error
    return None


def _requested_monitor(
    policy: Path | None,
    risk: str | None,
    loss: str | None,
    epsilon: float | None,
    loss_range: tuple[float | None, float | None],
    alpha: float | None,
    before: Path | None,
) -> "Monitor | None":
    """Return a monitor of the requested risk, with defaults from the state; None if none was."""
    from swiftsure.certify.policy import Policy
    from swiftsure.monitor import Monitor

    if policy is not None and epsilon is not None:
        raise ValueError("`--epsilon` must not be given with --policy, which sets it.")
    if policy is not None and loss_range != (None, None):
        raise ValueError("`--low` and `--high` must not be given with --policy, which sets them.")
    kept = None if before is None else Monitor.load(before)
    if alpha is None:
        alpha = ALPHA if kept is None else kept.alpha
    if policy is not None:
        found = Policy.load(policy)
        watched = Monitor.from_policy(found, alpha, risk=risk, loss=loss)
        _refuse_groups(found, policy, watched)
        return watched
    if epsilon is not None:
        return Monitor(epsilon, alpha, _with_defaults(loss_range, (0.0, 1.0)), risk=risk, loss=loss)
    if kept is None:
        return None
    within = _with_defaults(loss_range, (kept.loss_range.low, kept.loss_range.high))
    return Monitor(kept.epsilon, alpha, within, risk=risk or kept.risk, loss=loss or kept.loss)


def _refuse_groups(policy: "Policy", file: Path, watched: "Monitor") -> None:
    """Refuse a policy about groups: a line may be a request, and does not say its group."""
    certificate = policy.certificate
    if certificate.samples.unit != "groups":
        return
    each = "the mean loss of a group"
    if certificate.samples.average == "sample":
        most = certificate.samples.max_group_size
        each = f"Σℓ/M + ε (1 − m/M) for the m losses of a group, with M = {most}"
    within = watched.loss_range
    raise ValueError(
        f"`--policy`: {file} was calibrated by groups, so losses of single requests cannot be"
        f" watched. Write one line per group, with {each}, and watch them with --epsilon"
        f" {watched.epsilon:g} --low {within.low:g} --high {within.high:g} instead of --policy."
    )


def _with_defaults(
    given: tuple[float | None, float | None], otherwise: tuple[float, float]
) -> tuple[float, float]:
    low, high = given
    return (otherwise[0] if low is None else low, otherwise[1] if high is None else high)


def _drift(policy: Path | None, cost: str | None, record: Path | None) -> "Drift | None":
    """Return the drift detector behind the warnings; None without a policy, which it needs."""
    import swiftsure as ss
    from swiftsure.monitor import Drift

    if policy is None:
        if cost is not None or record is not None:
            raise ValueError("`--cost` and `--record` need --policy, which says what to expect.")
        return None
    loaded = ss.Policy.load(policy)
    if record is None:
        return Drift(loaded, cost=cost)
    calibration, score = ss.load_record(record), loaded.score or ""
    known = isinstance(calibration, ss.ExitRecord) and (
        loaded.rule.is_learned or score in calibration.confidences
    )
    if not isinstance(calibration, ss.ExitRecord) or not known:
        raise ValueError(f"`--record` must hold confidences {score!r}, the policy's score.")
    first = min(loaded.min_exit, calibration.n_exits - 2)
    return Drift(loaded, cost=cost, confidences=calibration.confidences_of(loaded.rule)[:, first])


def _watch(
    promised: "Monitor | None",
    drift: "Drift | None",
    before: Path | None,
    patience: int | None,
    missing: str | None,
) -> "Watch":
    """Return the watch saved in the state file, or a new one."""
    from swiftsure.monitor import Watch

    if before is None:
        if promised is None:
            raise ValueError("`--policy` or `--epsilon` must say what to watch.")
        return Watch(
            promised, drift, patience=patience, missing="lowest" if missing is None else missing
        )
    watch = Watch.load(before, drift, patience=patience, missing=missing)
    if promised is not None and promised.promise != watch.monitor.promise:
        raise ValueError(
            f"`--state`: {before} watches another risk ({watch.monitor.promise}) than asked for"
            f" ({promised.promise}); choose another file for it."
        )
    return watch


@contextmanager
def _open_stream(stream: Path, watch: "Watch", from_start: bool) -> Iterator[BinaryIO]:
    """Open a stream at the position where reading resumes."""
    if str(stream) == "-":
        if from_start:
            watch.restart()
        yield sys.stdin.buffer
        return
    with stream.open("rb") as file:
        in_file = stream.is_file()  # a pipe has no position to resume from
        if from_start:
            watch.restart(file if in_file else None, str(stream))
        if in_file:
            watch.resume(file, str(stream))
        yield file


class _StreamReplacedError(ValueError):
    """A followed file is shorter than what was read of it."""


class _Run:
    """Reads a stream into a watch and saves its state as it goes, so that it may be killed.

    Saving takes at most a tenth of the time, so that a state with many waiting requests does not
    slow the stream down. What was read since is not lost if the run is killed: a file is read again
    from the saved position, and what came from a pipe is in a journal.

    Attributes
    ----------
    unsaved : Exception, optional
        Why the state could not be saved. Reading goes on, except when following a stream, since an
        alarm must be seen.
    replaced : Exception, optional
        Set if a followed file was replaced, which ends the run.
    """

    def __init__(self, watch: "Watch", state: Path | None, unsaved: Exception | None) -> None:
        from swiftsure.monitor.journal import Journal

        self.watch = watch
        self.state = state
        self.journal = None if state is None else Journal(state, watch.monitor.promise)
        self.unsaved = unsaved
        self.replaced: Exception | None = None
        self._piped = False
        self._due_at = 0.0
        self._unsaved_data = True

    def read(self, stream: Path, *, from_start: bool, follow: bool) -> tuple[str | None, bool]:
        """Read to the end, an alarm or a fault; return the fault and whether the end is cut."""
        from swiftsure.monitor import StreamFaultError

        watch, cut = self.watch, False
        try:
            if self.journal is not None:
                watch.replay(self.journal.read(watch.saved))
            if not watch.monitor.alarm:
                with _open_stream(stream, watch, from_start) as file:
                    self._piped = not watch.in_file
                    if self._piped:
                        self._save()
                    cut = self._read(file, follow)
        except StreamFaultError as error:
            return f"{error} Nothing after it was read.", cut
        except _StreamReplacedError as error:
            self.replaced = error
        return None, cut

    def read_logs(self, paths: list[Path], *, follow: bool) -> str | None:
        """Read several logs to their ends, an alarm or a fault; return the fault.

        The latest lines wait for the next run or round, if there may be one: another log may still
        get a line that belongs before them.
        """
        from swiftsure.monitor import StreamFaultError
        from swiftsure.monitor.logs import log_files

        settle = SETTLE if follow or self.state is not None else -math.inf
        try:
            while True:
                with _defer_interrupt():
                    self._unsaved_data |= self.watch.read_logs(
                        log_files(paths), time.time() - settle
                    )
                if self._due_at <= time.monotonic():
                    self._save()
                if not follow or self.watch.monitor.alarm or self.unsaved is not None:
                    return None
                time.sleep(PAUSE)
        except StreamFaultError as error:
            return f"{error} Nothing after it was read."
        except KeyboardInterrupt:  # Ctrl-C stops following
            if not follow:
                raise
        return None

    def _read(self, file: BinaryIO, follow: bool) -> bool:
        """Read to the end or to an alarm; return whether the last line is cut short."""
        read = getattr(file, "read1", file.read)  # what is available, without waiting for more
        try:
            while not self.watch.monitor.alarm:
                data = read(CHUNK)
                if not data and follow:
                    if self._due_at <= time.monotonic():
                        self._save()
                    if self.unsaved is not None:
                        return False
                    _check_not_shrunk(file)
                    time.sleep(PAUSE)
                    continue
                if not data:
                    return self.watch.finish()
                with _defer_interrupt():
                    self._keep(data)
        except KeyboardInterrupt:  # Ctrl-C stops following
            if not follow:
                raise
        return False

    def _keep(self, data: bytes) -> None:
        """Process a chunk so that it survives this process, if possible."""
        if self._piped and self.journal is not None and self.unsaved is None:
            try:
                self.journal.append(data)
            except OSError as error:
                self.unsaved = error
        self.watch.feed(data)
        self._unsaved_data = True
        if self._due_at <= time.monotonic():
            self._save()

    def _save(self) -> None:
        """Write the state, and start a new journal after it, unless that failed before."""
        if self.state is None or self.journal is None or not self._unsaved_data:
            return
        if self.unsaved is not None:
            return
        began = time.monotonic()
        try:
            if _has_losses(self.watch):
                self.watch.save(self.state)
            if self._piped:
                self.journal.start(self.watch.saved, self.watch.rest)
        except (OSError, ValueError) as error:
            self.unsaved = error
        ended = time.monotonic()
        self._due_at, self._unsaved_data = ended + 9 * (ended - began), False

    def finish(self) -> None:
        """Write the state at the end of the stream."""
        if self.journal is None:
            return
        self._piped, self._unsaved_data = False, True
        self._save()
        if self.unsaved is None:
            self.journal.delete()


@contextmanager
def _defer_interrupt() -> Iterator[None]:
    """Defer Ctrl-C to the end of the block, so that a chunk counts entirely or not at all."""
    asked: list[int] = []
    usual = signal.signal(signal.SIGINT, lambda number, _: asked.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if asked:
        signal.raise_signal(signal.SIGINT)


def _has_losses(watch: "Watch") -> bool:
    """Whether the stream contained or announced a loss."""
    return watch.monitor.n > 0 or watch.order.in_use


def _check_not_shrunk(file: BinaryIO) -> None:
    """Raise if a followed file is now shorter than what was read from it."""
    if not file.seekable():
        return
    place = file.tell()
    if os.fstat(file.fileno()).st_size < place:
        raise _StreamReplacedError(
            f"`stream` became shorter than the {place:,} bytes read: it was replaced."
        )


def _show(watch: "Watch", fault: str | None, cut: bool, json: bool) -> bool:
    """Print what was found; return whether it could be printed where it belongs."""
    try:
        _print_findings(watch, cut, json, fault)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:  # a log on a full disk must not hide an alarm
        typer.echo(f"{watch.monitor}", err=True)
        typer.echo(f"swiftsure: standard output cannot be written ({error}).", err=True)
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    finally:
        if fault is not None:
            typer.echo(f"swiftsure: {one_line(fault)}", err=True)
    return True


def _print_findings(watch: "Watch", cut: bool, json: bool, fault: str | None) -> None:
    warnings = watch.drift.warnings() if watch.drift is not None else []
    if json:
        print_json(_summary(watch, fault, warnings))
    else:
        print_text(str(watch.monitor), "bold red" if watch.monitor.alarm else "")
        for text in _notes(watch, cut):
            print_text(text)
        for text in warnings:
            print_text(NO_GUARANTEE + text, "yellow")


def _notes(watch: "Watch", cut: bool) -> Iterator[str]:
    if watch.order.waiting:
        yield f"{watch.order.waiting:,} requests wait for their losses or for earlier ones."
    if watch.order.given_up:
        counted = "were skipped" if watch.order.missing == "skip" else "count as the lowest loss"
        yield f"{watch.order.given_up:,} losses never arrived and {counted}."
    if watch.order.too_late:
        yield f"{watch.order.too_late:,} losses arrived too late and were left out."
    if watch.odd:
        yield (
            f"{watch.odd:,} lines had an impossible exit, cost or confidence; their losses"
            " count, but the warnings ignore them."
        )
    if watch.unreadable:
        yield (
            f"{watch.unreadable:,} lines could not be read and were left out; the guarantee assumes"
            " that this did not depend on their losses."
        )
    if cut:
        yield "The last line is cut short; it will be read once it is complete."


def _summary(watch: "Watch", fault: str | None, warnings: list[str]) -> dict[str, Any]:
    found = watch.monitor
    return {
        **{name: getattr(found, name) for name in ("alarm", "alarm_at", "n", "mean")},
        **{name: getattr(found, name) for name in ("recent_mean", "epsilon", "alpha", "evidence")},
        "evidence_needed": 1.0 / found.alpha,
        "p_value": found.p_value,
        **{name: getattr(watch.order, name) for name in ("waiting", "given_up", "too_late")},
        "unreadable": watch.unreadable,
        "odd": watch.odd,
        "saving": None if watch.drift is None else watch.drift.saving,
        "warnings_without_guarantee": warnings,
        "fault": fault,
        "sentence": str(found),
    }
