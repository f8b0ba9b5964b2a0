"""`swiftsure label`: ask for the labels that a calibration needs, in the order of its walk."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swiftsure.cli import options
from swiftsure.cli.options import optional
from swiftsure.cli.output import check_outputs, print_json, print_policy, print_text
from swiftsure.cli.requests import request_of

if TYPE_CHECKING:
    from swiftsure.cascade.answer_sheet import AnswerSheet
    from swiftsure.records import ExitRecord

__all__ = ["label"]

MOST_CLASSES = 2**31
"""Class numbers are below this; the predictions of a record are stored so."""


def label(
    context: typer.Context,
    record: options.RecordFile,
    promise: options.Promises = None,
    epsilon: options.Epsilon = None,
    delta: options.Delta = 0.1,
    path: options.Route = None,
    rule: options.Rule = None,
    request: options.Request = None,
    budget: Annotated[int | None, optional("Largest number of labels to ask for.")] = None,
    loss: Annotated[
        str | None, optional("Name of the loss.", default="zero_one, or the record's only one")
    ] = None,
    classes: Annotated[
        Path | None, optional("File with the names of the classes, one per line, from class 0 on.")
    ] = None,
    answers: Annotated[
        list[Path] | None,
        optional("For a cascade: the logs that made the record, or the folder of `collect`."),
    ] = None,
    models: Annotated[
        str | None, optional("With --answers: the models, cheapest first, comma-separated.")
    ] = None,
    questions: Annotated[
        Path | None,
        optional("With a folder: its inputs in their order, one per line, or as JSON in .jsonl."),
    ] = None,
    write: Annotated[
        Path | None, optional("Write the ids to label to this CSV, instead of asking.")
    ] = None,
    read: Annotated[Path | None, optional("Read labels from this CSV, instead of asking.")] = None,
    output: Annotated[
        Path | None,
        optional("Write the labelled record here.", "--output", "-o", default="RECORD itself"),
    ] = None,
    json: options.Json = False,
) -> None:
    r"""Get the labels that certify the accuracy gap, and no others.

    A label matters only if an exit disagrees with the full model. In the
    terminal, the walk asks for the labels of one setting at a time, from
    the safest on, and ends where a setting fails or the budget is spent.
    Every answer is saved at once; an empty answer ends the walk. A second
    labeller of the same file is refused until the first one has ended.

    With --write, the ids are written to a CSV file (id, label) in the
    order in which the walk needs them; fill in labels from the top, and
    read them with --read. Then calibrate with --missing stop.

    A cascade of language models needs its --answers, which are shown
    with the questions and compared with the label.

    [bold]Examples[/bold]

        swiftsure label record.parquet --budget 100 \
            --promise 'gap zero_one <= 0.05'

        swiftsure label pool.parquet --budget 100 --write todo.csv

        swiftsure label pool.parquet --read done.csv -o labelled.parquet

        swiftsure label texts.parquet --epsilon 0.05 \
            --answers proxy.jsonl --models mini,full
    """
    import swiftsure as ss
    from swiftsure.records.files import reading

    if write is not None and read is not None:
        raise ValueError("`--write` and `--read` are two steps; use one at a time.")
    if output is None and record.suffix.lower() != ".parquet" and write is None:
        raise ValueError("`--output` must be given for records that are not Parquet files.")
    target = output or record
    asks = write is None and read is None
    check_outputs(target if write is None else write)
    # Claimed before the record is read, so that nobody's labels are overwritten.
    with nullcontext() if write is not None else _claimed(target):
        loaded = _loaded(record)
        # What is still unlabelled does not depend on the level, so a file of ids needs none.
        named = None if promise or request else _chosen_loss(loaded, loss)
        asked = request_of(context, [record], loss=named, epsilon=None if asks else 0.5)
        where: dict[str, Any] = {"path": asked.path, "rule": asked.rule}
        named = next((each.loss for each in asked.risks if each.loss is not None), loss)
        loss = _chosen_loss(loaded, named)
        guide = _guide(loaded, loss, classes, _sheet(loaded, answers, models, questions))
        if write is not None:
            wanted = loaded.needs_label(loss, **where, budget=budget)
            _write(write, loaded, wanted.tolist(), guide)
            _say(json, {"to label": len(wanted), "file": str(write)}, f"{len(wanted):,} to label.")
            return
        guide.check_usable()
        if read is not None:
            with reading(read):
                labelled, added = _read(loaded, read, guide)
            labelled.save(target)
            left = len(labelled.needs_label(loss, **where))
            _say(
                json,
                {"added": added, "missing": left, "file": str(target)},
                f"{added:,} labels added; {left:,} that could matter are missing.\nWrote {target}",
            )
            return
        desk = _Desk(loaded, target, guide)
        policy: Any = replace(asked, missing=ss.Ask(desk.ask, budget)).run(loaded)
    if json:
        print_json({"asked": desk.asked, "file": str(target), "sentence": str(policy)})
        return
    print_policy(policy)
    print_text(f"{desk.asked:,} labels asked for." + f" Wrote {target}" * bool(desk.asked))


def _chosen_loss(record: "ExitRecord", loss: str | None) -> str:
    """Return the loss to label for, which must be known where answers agree."""
    from swiftsure._lib import checks
    from swiftsure.records.checks import gap_is_known_by_agreement

    known = [name for name in record.inconsistencies if gap_is_known_by_agreement(name)]
    if loss is None and ("zero_one" in known or not known):
        return "zero_one"
    if loss is None and len(known) > 1:
        raise ValueError(f"`--loss` must be one of {', '.join(known)}.")
    return known[0] if loss is None else checks.choice("--loss", loss, known)


def _sheet(
    record: "ExitRecord", answers: list[Path] | None, models: str | None, questions: Path | None
) -> "AnswerSheet | None":
    """Return the questions and answers behind the record, if they are given."""
    from swiftsure.cascade.answer_sheet import AnswerSheet

    if not answers:
        if models is not None or questions is not None:
            raise ValueError("`--models` and `--questions` belong to --answers, which is missing.")
        return None
    names = None if models is None else [name.strip() for name in models.split(",")]
    if not any(each.is_dir() for each in answers):
        if questions is not None:
            raise ValueError("`--questions` is for a folder of answers; logs hold their questions.")
        return AnswerSheet.of_logs(record, answers, names)
    if len(answers) > 1 or questions is None or names is None:
        raise ValueError("`--answers` with a folder needs --questions and --models, and no logs.")
    return AnswerSheet.of_folder(record, answers[0], questions, names)


def _guide(
    record: "ExitRecord", loss: str, classes: Path | None, sheet: "AnswerSheet | None"
) -> "_Classes | _Answers":
    if sheet is not None:
        if classes is not None:
            raise ValueError("`--classes` is for classifiers, and --answers for cascades.")
        sheet.check(record, loss)
        return _Answers(loss, sheet)
    names = None if classes is None else classes.read_text(encoding="utf-8").split("\n")
    return _Classes(loss, record, names and [name.strip() for name in names if name.strip()])


@dataclass(frozen=True)
class _Classes:
    """Labels of a classifier are class numbers, and its exits' predictions give the losses."""

    loss: str
    record: "ExitRecord"
    names: list[str] | None
    columns = ()

    def check_usable(self) -> None:
        if self.record.predictions is None or self.loss != "zero_one":
            raise ValueError(
                f"`--answers` must be given, so that labels become losses {self.loss}: `record`"
                " does not hold what its models answered. (--write needs no answers.)"
            )

    def asked(self, sample: Any, row: int) -> str:
        predictions = self.record.predictions
        if predictions is None:
            return str(sample)
        said = dict.fromkeys(predictions[row].tolist())
        names = [self.names[k] if self.names else str(k) for k in said]
        return f"{sample} (exits say {', '.join(names)})"

    def label(self, _row: int, text: str) -> int:
        return _class_number(text, self.names)

    def cells(self, _row: int) -> list[str]:
        return []

    def losses(self, rows: list[int], labels: list[Any]) -> Any:
        import numpy as np

        predictions = np.asarray(self.record.predictions)[rows]
        return (predictions != np.asarray(labels)[:, None]).astype(np.float64)


@dataclass(frozen=True)
class _Answers:
    """Labels of a cascade are right answers, which its models' answers are compared with."""

    loss: str
    sheet: "AnswerSheet"

    @property
    def columns(self) -> tuple[str, ...]:
        return ("question", *self.sheet.models)

    def check_usable(self) -> None:
        """Every label can be compared with the answers."""

    def asked(self, sample: Any, row: int) -> str:
        return f"{sample}\n{self.sheet.shown(row)}\n  right answer"

    def label(self, row: int, text: str) -> Any:
        try:
            return self.sheet.label(row, text)
        except ValueError:
            raise ValueError(f"`label` must be a class number, but got {text!r}.") from None

    def cells(self, row: int) -> list[str]:
        return self.sheet.cells(row)

    def losses(self, rows: list[int], labels: list[Any]) -> Any:
        return self.sheet.losses(self.loss, rows, labels)


def _loaded(path: Path) -> "ExitRecord":
    import swiftsure as ss

    record = ss.load_record(path)
    if not isinstance(record, ss.ExitRecord):
        raise ValueError(f"`record` must hold an ExitRecord, but {path} does not.")
    return record


@contextmanager
def _claimed(target: Path) -> Iterator[None]:
    """Keep others from labelling the same file, under any of its names, until this ends."""
    from swiftsure._lib.files import STDOUT, LockedError, locked

    if target == STDOUT or (target.exists() and not target.is_file()):
        yield  # a pipe or a device holds no labels
        return
    file = target.resolve()
    try:
        with locked(file.with_name(f".{file.name}.run")):
            yield
    except LockedError:
        raise LockedError(
            f"{target} is being labelled by another process: wait for it to end, or write to"
            " another file with `--output`."
        ) from None


def _say(json: bool, facts: dict[str, Any], text: str) -> None:
    print_json(facts) if json else print_text(text)


class _Desk:
    """Asks for labels on standard input, and saves the record after each answer."""

    def __init__(self, record: "ExitRecord", target: Path, guide: "_Classes | _Answers") -> None:
        self.record = record.with_labels([])
        self.target, self.guide = target, guide
        self.asked = 0
        self.at = {name: row for row, name in enumerate(record.ids.tolist())}

    def ask(self, ids: Any) -> Mapping[str, Any]:
        """Return the losses of some samples; NaN from the first empty answer on."""
        import numpy as np

        found = np.full((len(ids), self.record.n_exits), np.nan)
        for i, sample in enumerate(ids.tolist()):
            row = self.at[sample]
            label = self._answer(sample, row)
            if label is None:
                break
            found[i] = self.guide.losses([row], [label])[0]
            self.asked += 1
            losses = {self.guide.loss: found[i : i + 1]}
            self.record = self.record.with_labels([sample], losses=losses)
            self.record.save(self.target)
        return {self.guide.loss: found}

    def _answer(self, sample: Any, row: int) -> Any:
        while True:
            typer.echo(f"{self.guide.asked(sample, row)}: ", nl=False, err=True)
            line = sys.stdin.readline().strip()
            if not line:
                return None
            try:
                return self.guide.label(row, line)
            except ValueError as error:
                typer.echo(str(error), err=True)


def _class_number(text: str, classes: Sequence[str] | None) -> int:
    """Return the class number of an answer: a name among the classes, or a number."""
    if classes is not None and text in classes:
        return list(classes).index(text)
    most = MOST_CLASSES if classes is None else len(classes)
    if text.isdecimal() and len(text) < 20 and int(text) < most:
        return int(text)
    raise ValueError(f"`label` must be a class number or name, but got {text!r}.")


def _write(file: Path, record: "ExitRecord", ids: list[Any], guide: "_Classes | _Answers") -> None:
    import csv
    import io

    from swiftsure._lib.files import write_text

    at = {name: row for row, name in enumerate(record.ids.tolist())}
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["id", "label", *guide.columns])
    lines.writerows([sample, "", *guide.cells(at[sample])] for sample in ids)
    write_text(file, text.getvalue())


def _read(
    record: "ExitRecord", file: Path, guide: "_Classes | _Answers"
) -> tuple["ExitRecord", int]:
    """Return the record with the labels of a CSV, and how many were added.

    Labels that the record has already are skipped if they are the same.
    """
    import csv

    import numpy as np

    try:
        with file.open(newline="", encoding="utf-8-sig") as opened:
            lines = list(csv.DictReader(opened))
    except csv.Error as error:
        raise ValueError(f"{file} is not a CSV file: {error}.") from None
    if lines and not {"id", "label"} <= lines[0].keys():
        raise ValueError(f"{file} must have the columns id and label.")
    filled = [line for line in lines if (line["label"] or "").strip()]
    try:
        ids = np.asarray([(line["id"] or "").strip() for line in filled])
        ids = ids.astype(record.ids.dtype)
    except ValueError:
        raise ValueError(f"{file} must hold ids of the record, which are whole numbers.") from None
    record = record.with_labels([])
    if not filled:
        return record, 0
    at = {name: row for row, name in enumerate(record.ids.tolist())}
    unknown = [name for name in ids.tolist() if name not in at]
    if unknown:
        raise ValueError(f"{file} must hold ids of the record, but {unknown[0]!s} is not one.")
    rows = [at[name] for name in ids.tolist()]
    labels = [
        guide.label(row, line["label"].strip()) for row, line in zip(rows, filled, strict=True)
    ]
    losses = guide.losses(rows, labels)
    before = record.losses[guide.loss][rows]
    known = ~np.isnan(before).any(axis=1)
    if not np.array_equal(losses[known], before[known]):
        raise ValueError(f"{file} holds other labels than the record for samples it labels.")
    new = ~known
    added = {guide.loss: losses[new]}
    return record.with_labels(ids[new], losses=added) if new.any() else record, int(new.sum())
