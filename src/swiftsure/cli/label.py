"""`swiftsure label`: ask for the labels that a calibration needs, in the order of its walk."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swiftsure.cli import options
from swiftsure.cli.options import optional
from swiftsure.cli.output import check_outputs, print_json, print_policy, print_text
from swiftsure.cli.requests import request_text

if TYPE_CHECKING:
    from swiftsure.records import ExitRecord

__all__ = ["label"]


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
    classes: Annotated[
        Path | None, optional("File with the names of the classes, one per line, from class 0 on.")
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
    Every answer is saved at once; an empty answer ends the walk.

    With --write, the ids are written to a CSV file (id, label) in the
    order in which the walk needs them; fill in labels from the top, and
    read them with --read. Then calibrate with --missing stop.

    [bold]Examples[/bold]

        swiftsure label record.parquet --budget 100 \
            --promise 'gap zero_one <= 0.05'

        swiftsure label pool.parquet --budget 100 --write todo.csv

        swiftsure label pool.parquet --read done.csv -o labelled.parquet
    """
    import swiftsure as ss

    if write is not None and read is not None:
        raise ValueError("`--write` and `--read` are two steps; use one at a time.")
    if output is None and record.suffix.lower() != ".parquet" and write is None:
        raise ValueError("`--output` must be given for records that are not Parquet files.")
    check_outputs(output, write)
    loaded = ss.load_record(record)
    if not isinstance(loaded, ss.ExitRecord):
        raise ValueError(f"`record` must hold an ExitRecord, but {record} does not.")
    names = None if classes is None else classes.read_text(encoding="utf-8").split("\n")
    names = names and [name.strip() for name in names if name.strip()]
    target = output or record
    asks = write is None and read is None
    # What is still unlabelled does not depend on the level, so a file of ids needs none.
    level = epsilon if asks or epsilon is not None else 0.5
    asked = request_text(
        context,
        request,
        promise,
        loss="zero_one",
        epsilon=level,
        delta=delta,
        path=path,
        rule=rule,
    ).calibration([record])
    where: dict[str, Any] = {"path": asked.path, "rule": asked.rule}
    name = next((each.loss for each in asked.risks if each.loss is not None), "zero_one")
    if write is not None:
        wanted = loaded.needs_label(name, **where, budget=budget)
        _write(write, wanted.tolist())
        _say(json, {"to label": len(wanted), "file": str(write)}, f"{len(wanted):,} to label.")
        return
    if read is not None:
        labelled, added = _read(loaded, read, names)
        labelled.save(target)
        left = len(labelled.needs_label(name, **where))
        _say(
            json,
            {"added": added, "missing": left, "file": str(target)},
            f"{added:,} labels added; {left:,} that could matter are missing.\nWrote {target}",
        )
        return
    desk = _Desk(loaded, target, names)
    policy: Any = replace(asked, missing=ss.Ask(desk.ask, budget)).run(loaded)
    if json:
        print_json({"asked": desk.asked, "file": str(target), "sentence": str(policy)})
        return
    print_policy(policy)
    print_text(f"{desk.asked:,} labels asked for." + f" Wrote {target}" * bool(desk.asked))


def _say(json: bool, facts: dict[str, Any], text: str) -> None:
    print_json(facts) if json else print_text(text)


class _Desk:
    """Asks for labels on standard input, and saves the record after each answer."""

    def __init__(self, record: "ExitRecord", target: Path, classes: list[str] | None) -> None:
        self.record = record.with_labels([])
        self.target = target
        self.classes = classes
        self.asked = 0
        self.at = {name: row for row, name in enumerate(record.ids.tolist())}

    def ask(self, ids: Any) -> list[Any]:
        """Return the labels of some samples; None from the first empty answer on."""
        found: list[Any] = []
        for sample in ids.tolist():
            number = self._answer(sample)
            if number is None:
                break
            found.append(number)
            self.asked += 1
            self.record = self.record.with_labels([sample], [number])
            self.record.save(self.target)
        return found + [None] * (len(ids) - len(found))

    def _answer(self, sample: Any) -> int | None:
        predictions = self.record.predictions
        said = "" if predictions is None else self._names(predictions[self.at[sample]].tolist())
        while True:
            typer.echo(f"{sample}{said}: ", nl=False, err=True)
            line = sys.stdin.readline().strip()
            if not line:
                return None
            try:
                return _class_number(line, self.classes)
            except ValueError as error:
                typer.echo(str(error), err=True)

    def _names(self, predictions: list[int]) -> str:
        names = [self.classes[k] if self.classes else str(k) for k in dict.fromkeys(predictions)]
        return f" (exits say {', '.join(names)})"


def _class_number(text: str, classes: Sequence[str] | None) -> int:
    """Return the class number of an answer: a name among the classes, or a number."""
    if classes is not None and text in classes:
        return list(classes).index(text)
    most = None if classes is None else len(classes)
    if text.isdecimal() and (most is None or int(text) < most):
        return int(text)
    raise ValueError(f"`label` must be a class number or name, but got {text!r}.")


def _write(file: Path, ids: list[Any]) -> None:
    import csv
    import io

    from swiftsure._lib.files import write_text

    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["id", "label"])
    lines.writerows([sample, ""] for sample in ids)
    write_text(file, text.getvalue())


def _read(record: "ExitRecord", file: Path, classes: list[str] | None) -> tuple["ExitRecord", int]:
    """Return the record with the labels of a CSV, and how many were added.

    Labels that the record has already are skipped if they are the same.
    """
    import csv

    import numpy as np

    with file.open(newline="", encoding="utf-8-sig") as opened:
        rows = list(csv.DictReader(opened))
    if rows and not {"id", "label"} <= rows[0].keys():
        raise ValueError(f"{file} must have the columns id and label.")
    filled = [row for row in rows if (row["label"] or "").strip()]
    try:
        ids = np.asarray([row["id"].strip() for row in filled]).astype(record.ids.dtype)
    except ValueError:
        raise ValueError(f"{file} must hold ids of the record, which are whole numbers.") from None
    labels = np.asarray([_class_number(row["label"].strip(), classes) for row in filled], np.int64)
    record = record.with_labels([])
    if not filled:
        return record, 0
    rows_of = {name: row for row, name in enumerate(record.ids.tolist())}
    place = np.asarray([rows_of.get(name, -1) for name in ids.tolist()])
    known = (place >= 0) & ~np.isnan(record.losses["zero_one"][place]).any(axis=1)
    if known.any() and record.predictions is not None:
        at = place[known]
        same = record.predictions[at] != labels[known][:, None]
        if not np.array_equal(same, record.losses["zero_one"][at]):
            raise ValueError(f"{file} holds other labels than the record for samples it labels.")
    new = ~known
    return record.with_labels(ids[new], labels[new]), int(new.sum())
