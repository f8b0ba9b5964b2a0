"""`swiftsure reproduce`: the paper's experiments, one command each."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swiftsure.cli import options
from swiftsure.cli.commands import Group, Verb
from swiftsure.cli.output import print_json, print_table, print_text

if TYPE_CHECKING:
    from swiftsure.reproduce.sweeps import SweepResult

__all__ = ["reproduce"]

reproduce = typer.Typer(cls=Group, no_args_is_help=True)


Splits = Annotated[int, typer.Option(help="Random splits.")]
Draws = Annotated[int, typer.Option(help="Calibration sets that test the promises.")]
TextRisk = Annotated[str, typer.Option(help="gap, or consistency with the full model.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Folder for figures and tables.")]


@reproduce.callback()
def experiments() -> None:
    """Repeat an experiment of the paper.

    Tables are printed; they and the figures are written to a folder.

    [bold]Example[/bold]

        swiftsure reproduce image-classification --draws 100 -o results
    """


@reproduce.command("calm-cnndm", cls=Verb)
def calm_cnndm(
    data: Annotated[
        Path,
        typer.Option(
            help="npz with thresholds, mean_layers and rouge_l, from the measurements that the"
            " paper's authors published with their code.",
            show_default=False,
        ),
    ],
    splits: Splits = 400,
    delta: options.Delta = 0.1,
    seed: options.Seed = 0,
    output: Output = Path("results/calm_cnndm"),
    json: options.Json = False,
) -> None:
    """Text summarisation with CALM on CNN/DM (Fig. 2 of the paper).

    [bold]Example[/bold]

        swiftsure reproduce calm-cnndm --data calm_cnndm.npz -o results
    """
    from swiftsure.reproduce import calm_cnndm as experiment

    result = experiment(
        data, splits=splits, delta=delta, seed=seed, progress=False if json else None
    )
    files = result.write(output)
    table = result.table()
    if json:
        _print_all(files, table=table)
        return
    levels = [key for key in table[0] if key.startswith("ε")]
    print_table(
        f"Mean decoder layers per token over {splits} splits",
        ["control", "n", *levels],
        [[row["control"], f"{row['n']:,}", *(f"{row[k]:.2f}" for k in levels)] for row in table],
    )
    _print_files(files)


@reproduce.command("calm", cls=Verb)
def calm(
    records: Annotated[
        Path | None,
        typer.Option(
            help="Folder of NAME_SCORE.parquet, one a measure; the library's own by default."
        ),
    ] = None,
    risk: TextRisk = "gap",
    loss: Annotated[str, typer.Option(help="Loss of the records: bleu or rouge_l.")] = "bleu",
    splits: Splits = 100,
    delta: options.Delta = 0.1,
    seed: options.Seed = 0,
    output: Output = Path("results/calm"),
    json: options.Json = False,
) -> None:
    """Text generation with CALM (section 5.3 of the paper).

    [bold]Example[/bold]

        swiftsure reproduce calm --loss rouge_l -o results
    """
    from swiftsure import assets
    from swiftsure.reproduce import calm as experiment
    from swiftsure.reproduce.calm import load_sweeps

    result = experiment(
        load_sweeps(records or assets.CALM),
        risk=risk,
        loss=loss,
        splits=splits,
        delta=delta,
        seed=seed,
        progress=False if json else None,
    )
    files = result.write(output)
    table = result.table()
    if json:
        _print_all(files, table=table)
        return
    levels = [key for key in table[0] if key.startswith("ε")]
    print_table(
        f"Mean decoder layers a token, and FLOPs saved, over {splits} splits: {risk} of {loss}",
        ["score", "control", "n", *levels],
        [
            [row["score"], row["control"], f"{row['n']:,}"]
            + [_layers(row[level], row.get(f"saved, {level}")) for level in levels]
            for row in table
        ],
        left=2,
    )
    _print_files(files)


@reproduce.command("image-classification", cls=Verb)
def image_classification(
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of exit records; the library's own by default."),
    ] = None,
    splits: Splits = 100,
    draws: Draws = 1000,
    delta: options.Delta = 0.1,
    seed: options.Seed = 0,
    output: Output = Path("results/image_classification"),
    json: options.Json = False,
) -> None:
    """Image classification (Figs. 1, 3 and 8, Table 2 of the paper).

    [bold]Example[/bold]

        swiftsure reproduce image-classification --draws 100 -o results
    """
    from swiftsure.reproduce import image_classification as experiment

    result = experiment(
        data,
        splits=splits,
        draws=draws,
        delta=delta,
        seed=seed,
        progress=False if json else None,
    )
    files = result.write(output)
    table, kept = result.table(), result.promises()
    if json:
        _print_all(files, table=table, promises=kept)
        return
    columns = [name for name in table[0] if "ε" in name]
    for n in result.studies:
        print_table(
            f"Gain in mean exit, %, over {splits} splits: n = {n:,}, ε = 0.01 and 0.05",
            ["model", "n", "control", *result.studies[n]],
            [
                [
                    row["model"],
                    f"{n:,}",
                    row["control"],
                    *_pairs([row[name] for name in columns]),
                ]
                for row in table
                if row["n"] == n
            ],
            left=3,
        )
    print_table(
        "Promises kept, over all models, risks and levels",
        ["control", "n", "promise", "worst found", "interval"],
        [
            [row["control"], f"{row['n']:,}", row["promise"], row["worst"], row["interval"]]
            for row in kept
        ],
        left=3,
    )
    print_text(
        "The worst of all models, risks and levels: of so many, some lie above their true rate by"
        " chance. More --draws narrow it down."
    )
    _print_files(files)


@reproduce.command("diffusion", cls=Verb)
def diffusion(
    record: Annotated[
        Path | None,
        typer.Option(help="Threshold record of pairs of images; the library's own by default."),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(help="Loss of the record that is controlled; by default LPIPS."),
    ] = None,
    n: Annotated[int, typer.Option("--n", help="Pairs to calibrate on.")] = 500,
    splits: Splits = 100,
    delta: options.Delta = 0.1,
    seed: options.Seed = 0,
    output: Output = Path("results/diffusion"),
    json: options.Json = False,
) -> None:
    """Image generation with DeeDiff (section 5.4 of the paper).

    [bold]Example[/bold]

        swiftsure reproduce diffusion --splits 20 -o results
    """
    from swiftsure.reproduce import diffusion as experiment

    result = experiment(
        record,
        loss=loss,
        n_calibration=n,
        splits=splits,
        delta=delta,
        seed=seed,
        progress=False if json else None,
    )
    _show_sweep(
        result,
        output,
        f"Means over {splits} splits: {result.study.loss} against the full model, n = {n:,}",
        json,
    )


@reproduce.command("bild", cls=Verb)
def bild(
    record: Annotated[
        Path | None,
        typer.Option(help="Threshold record of a pair of models; the library's own by default."),
    ] = None,
    risk: TextRisk = "gap",
    loss: Annotated[str, typer.Option(help="Loss of the record.")] = "bleu",
    n: Annotated[int, typer.Option("--n", help="Sentences to calibrate on.")] = 500,
    splits: Splits = 100,
    delta: options.Delta = 0.1,
    seed: options.Seed = 0,
    output: Output = Path("results/bild"),
    json: options.Json = False,
) -> None:
    """Speculative decoding with BiLD (section 5.5 of the paper).

    [bold]Example[/bold]

        swiftsure reproduce bild --splits 20 -o results
    """
    from swiftsure.reproduce import bild as experiment

    result = experiment(
        record,
        risk=risk,
        loss=loss,
        n_calibration=n,
        splits=splits,
        delta=delta,
        seed=seed,
        progress=False if json else None,
    )
    _show_sweep(result, output, f"Means over {splits} splits: {loss} {risk}, n = {n:,}", json)


@reproduce.command("segmentation", cls=Verb)
def segmentation(
    record: Annotated[
        Path | None,
        typer.Option(
            help="Exit record with the nine image-level scores; the library's own by default."
        ),
    ] = None,
    scenes: Annotated[
        Path | None,
        typer.Option(
            help="npz with labels, predictions and confidences of two scenes; the library's own"
            " with its record."
        ),
    ] = None,
    splits: Splits = 100,
    draws: Draws = 1000,
    delta: options.Delta = 0.1,
    seed: options.Seed = 0,
    output: Output = Path("results/segmentation"),
    json: options.Json = False,
) -> None:
    """Semantic segmentation (section 5.2 of the paper, Tables 1, 3 and 4).

    [bold]Example[/bold]

        swiftsure reproduce segmentation --draws 100 -o results
    """
    from swiftsure import assets
    from swiftsure.files import npz
    from swiftsure.records import ExitRecord
    from swiftsure.reproduce import segmentation as experiment

    if record is None:
        record = assets.SEGMENTATION
        scenes = scenes or record.with_suffix(".npz")
    result = experiment(
        ExitRecord.load(record),
        splits=splits,
        draws=draws,
        delta=delta,
        seed=seed,
        progress=False if json else None,
    )
    arrays = None
    if scenes is not None:
        with npz(scenes) as held:
            arrays = {name: held[name] for name in held}
    files = result.write(output, arrays)
    tables = {gain: result.table(gain) for gain in ("exit", "flops")}
    if json:
        _print_all(files, tables=tables)
        return
    for gain, title in (("exit", "mean exit"), ("flops", "FLOPs")):
        print_table(
            f"Gain in {title}, %, over {splits} splits: ε = 0.01, 0.05 and 0.1",
            ["score", "gain in", *result.risks],
            [[row["score"], title, *_triples(list(row.values())[1:])] for row in tables[gain]],
            left=2,
        )
    if any(file.name == "by_video.csv" for file in files):
        print_text(
            "Frames were taken for independent, as in the paper, though these come from videos;"
            " by_video.csv shows each video under thresholds that the others certified."
        )
    _print_files(files)


def _layers(layers: float, saved: float | None) -> str:
    return f"{layers:.2f}" if saved is None else f"{layers:.2f}, {saved:.0f} %"


def _print_all(files: list[Path], **found: Any) -> None:
    """Print everything for machines."""
    print_json({**found, "files": [str(file) for file in files]})


def _print_files(files: list[Path]) -> None:
    for file in files:
        print_text(f"Wrote {file}")


def _show_sweep(result: "SweepResult", output: Path, title: str, json: bool) -> None:
    """Write what was found, and print its table."""
    files = result.write(output)
    table = result.table()
    if json:
        _print_all(files, table=table)
        return
    names = [name for name in table[0] if name not in ("control", "ε")]
    print_table(
        title,
        ["control", "ε", *names],
        [
            [row["control"], f"{row['ε']:g}", f"{row['test risk']:.3f}"]
            + [f"{row[name]:.2f}" for name in names[1:]]
            for row in table
        ],
    )
    _print_files(files)


def _triples(values: list[float | str]) -> list[str]:
    texts = [value if isinstance(value, str) else f"{value:.1f}" for value in values]
    return [" / ".join(texts[i : i + 3]) for i in range(0, len(texts), 3)]


def _pairs(values: list[float]) -> list[str]:
    return [f"{a:.1f} / {b:.1f}" for a, b in zip(values[::2], values[1::2], strict=True)]
