"""`swiftsure report`: write a self-contained HTML report about a policy."""

from pathlib import Path
from typing import Annotated

import typer

from swiftsure.cli import options
from swiftsure.cli.options import optional
from swiftsure.cli.output import check_outputs, print_json, print_policy, print_text

__all__ = ["report"]


def report(
    record: options.RecordFile,
    policy: Annotated[
        Path, typer.Argument(help="Policy (.json) calibrated on this record.", show_default=False)
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Write the page to this file.")
    ] = Path("report.html"),
    cost: Annotated[str | None, optional("Name of the cost to show.")] = None,
    accept_edited: options.AcceptEdited = False,
    json: options.Json = False,
) -> None:
    r"""Write one HTML page about a policy: promise, risk, saving, exits.

    The page is self-contained, so you can open, print or send it. The
    record must be the one that the policy was calibrated on. --json also
    prints the page's numbers.

    The exit status is 1 if the policy certifies nothing and runs the full
    model.

    [bold]Example[/bold]

        swiftsure report record.parquet deployed.json -o report.html
    """
    import swiftsure as ss
    from swiftsure._lib.files import write_text
    from swiftsure.report.findings import findings
    from swiftsure.report.page import rendered

    check_outputs(output)
    loaded = ss.Policy.load(policy, accept_edited=accept_edited)
    found = findings(ss.load_record(record), loaded, cost)
    write_text(output, rendered(found))
    if json:
        print_json(found.to_dict())
    else:
        print_policy(loaded)
        print_text(f"Wrote {output}")
    if loaded.runs_full_model:
        raise typer.Exit(1)
