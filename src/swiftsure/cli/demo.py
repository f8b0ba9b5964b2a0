"""`swiftsure demo`: calibrate a trained network, then run it with and without early exits."""

import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import typer

from swiftsure.cli import options
from swiftsure.cli.output import number, print_json, print_policy, print_table, print_text

if TYPE_CHECKING:
    from swiftsure.certify.policy import Policy
    from swiftsure.demo import SampleImages
    from swiftsure.records import ExitRecord

__all__ = ["demo"]

LEVELS = (0.005, 0.01, 0.02, 0.03)
BAR = 40


def demo(
    n: Annotated[int, typer.Option("--n", help="Number of calibration images.")] = 2000,
    epsilon: Annotated[float, typer.Option(help="Largest drop in accuracy allowed.")] = 0.01,
    delta: options.Delta = 0.1,
    batch: Annotated[int, typer.Option(help="Number of images that run at once.")] = 64,
    seed: options.Seed = 0,
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Export the network and run it in ONNX Runtime.")
    ] = False,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the policy and figures.")
    ] = Path("results/demo"),
    json: options.Json = False,
) -> None:
    """Certify a real network, then run it with and without early exits.

    The network has four exits and was trained on Fashion-MNIST. It is
    calibrated on some test images and then runs on others, to measure
    how much compute it saves and how much accuracy it loses. With --onnx it
    is first exported to ONNX files, which takes up to a minute.

    [bold]Example[/bold]

        swiftsure demo --epsilon 0.02 --n 1000
    """
    import swiftsure as ss
    from swiftsure import demo as shown
    from swiftsure._lib import checks
    from swiftsure.curves.sample_order import SampleOrder

    checks.count("batch", batch)
    record, images = shown.record(), shown.sample_images()
    rest = shown.calibration_record()
    if checks.count("n", n) > rest.n:
        raise ValueError(f"`--n` must be at most {rest.n:,}, the number of images, but got {n}.")
    rows = np.random.default_rng(seed).permutation(rest.n)[:n]
    calibration = replace(rest.take(rows), order=SampleOrder.of(seed))
    others = record.take(np.flatnonzero(~np.isin(record.ids, calibration.ids)))
    policies = {
        level: ss.calibrate(calibration, loss="zero_one", epsilon=level, delta=delta)
        for level in sorted({*LEVELS, epsilon})
    }
    policy = policies[epsilon]
    output.mkdir(parents=True, exist_ok=True)
    policy.save(output / "policy.json")
    curve = calibration.curve("gap", "zero_one")
    ss.report.policy_figure(curve, policy, output / "policy.png", cost="flops")
    tradeoff = [_tradeoff(each, others) for each in policies.values()]
    if not json:
        accuracy = shown.description()["test_accuracy"]
        accuracies = ", ".join(f"{100 * a:.1f}" for a in accuracy)
        print_text(
            f"A network for Fashion-MNIST with accuracies of {accuracies} % at its"
            f" {len(accuracy)} exits.\n"
        )
        print_policy(policy)
        _print_tradeoff(tradeoff, n, others.n)
    files = [output / "policy.json", output / "policy.png"]
    measured = None
    if find_spec("torch") is not None:
        exported = output / "onnx" if onnx else None
        files += [] if exported is None else [exported]
        ways = _ways(policy, images, exported)
        measured, exits = _run(ways, images, batch, progress=None if not json else False)
        files.append(output / "images.png")
        _images_figure(images, exits, files[-1])
    if json:
        print_json({"sentence": str(policy), "tradeoff": tradeoff, "measured": measured})
    else:
        if measured is None:
            print_text('\nTo run the network itself: pip install "swiftsure[torch]"')
        else:
            _print_measured(measured, len(images.labels), batch, policy)
        print_text(f"\nWrote {', '.join(map(str, files))}")
    if policy.runs_full_model:
        raise typer.Exit(1)


def _tradeoff(policy: "Policy", others: "ExitRecord") -> dict[str, Any]:
    """Return the level of a policy, and what it saves and loses on other images."""
    from swiftsure.exits import exit_indices

    if policy.thresholds is None:
        raise TypeError("the policy of an exit record has one threshold per exit")
    exits = exit_indices(others.confidences["top1"], policy.thresholds)
    rows = np.arange(others.n)
    flops, losses = others.costs["flops"], others.losses["zero_one"]
    full = others.full_costs.get("flops", flops[-1])
    lost = losses[rows, exits] - losses[:, -1]
    return {
        "epsilon": policy.certificate.promises[0].epsilon,
        "threshold": policy.threshold,
        "flops_saved": 100 * float(1 - flops[exits].mean() / full),
        "mean_exit": 1 + float(exits.mean()),
        "accuracy_lost": float(lost.mean()),
        "standard_error": float(lost.std() / np.sqrt(others.n)),
    }


def _print_tradeoff(tradeoff: list[dict[str, Any]], n: int, n_others: int) -> None:
    print_table(
        f"Savings at each level: calibrated on {n:,} images, tested on {n_others:,} others",
        ["ε", "threshold", "FLOPs saved %", "mean exit", "accuracy lost"],
        [
            [
                f"{row['epsilon']:g}",
                number(row["threshold"]),
                f"{row['flops_saved']:.1f}",
                f"{row['mean_exit']:.2f}",
                f"{row['accuracy_lost']:+.4f} ± {row['standard_error']:.4f}",
            ]
            for row in tradeoff
        ],
    )
    print_text(
        f"ε bounds the expected drop in accuracy; ± is its standard error on these {n_others:,}"
        " images. Each row's promise holds on its own, so fix ε before you look."
    )


class _Ways(NamedTuple):
    """Prepared images, and two ways to run batches of them."""

    inputs: Any
    full: Callable[[Any], Any]
    """Returns the logits of the full network."""
    early: Callable[[Any], Any]
    """Returns an `ExitOutput`."""
    n_exits: int


def _ways(policy: "Policy", images: "SampleImages", exported: Path | None) -> _Ways:
    """Return the network in PyTorch, or exported to a folder and run in ONNX Runtime."""
    import torch

    from swiftsure.demo.network import plain_network, prepared, trained_exits
    from swiftsure.torch import EarlyExit

    model = trained_exits()
    inputs, n_exits = prepared(images.images), model.n_exits
    if exported is None:
        full = torch.inference_mode()(plain_network())
        return _Ways(inputs, full, EarlyExit(model, policy), n_exits)
    from swiftsure import onnx

    onnx.export(model, policy, exported, example=inputs[:64])
    fast = onnx.EarlyExit.load(exported)
    return _Ways(
        inputs.numpy(),
        lambda batch: _full_output(fast.stages, batch).arrays[0],
        fast,
        n_exits,
    )


def _full_output(model: Any, batch: Any) -> Any:
    state = model.begin(batch)
    for k in range(model.n_exits):
        state = model.advance(k, state)
    return model.head(model.n_exits - 1, state)


def _run(
    ways: _Ways, images: "SampleImages", batch: int, progress: bool | None
) -> tuple[dict[str, Any], np.ndarray]:
    """Time the full network and early exits, alternating batch by batch."""
    from swiftsure._lib.progress import steps

    parts = [ways.inputs[k : k + batch] for k in range(0, len(ways.inputs), batch)]
    ways.full(parts[0]), ways.early(parts[0])
    seconds = {"full": 0.0, "early": 0.0}
    answers: dict[str, list[Any]] = {"full": [], "early": [], "exits": []}
    with steps("running the network", len(parts), progress) as advance:
        for x in parts:
            start = time.perf_counter()
            logits = ways.full(x)
            middle = time.perf_counter()
            out = ways.early(x)
            seconds["early"] += time.perf_counter() - middle
            seconds["full"] += middle - start
            answers["full"].append(np.asarray(logits).argmax(axis=1))
            answers["early"].append(np.asarray(out.predictions))
            answers["exits"].append(np.asarray(out.exits))
            advance()
    found = {name: np.concatenate(each) for name, each in answers.items()}
    right = {name: float((found[name] == images.labels).mean()) for name in ("full", "early")}
    shares = np.bincount(found["exits"], minlength=ways.n_exits) / len(images.labels)
    return {
        "images_per_second": {name: len(images.labels) / each for name, each in seconds.items()},
        "times_faster": seconds["full"] / seconds["early"],
        "accuracy": right,
        "exit_shares": shares.tolist(),
    }, found["exits"]


def _print_measured(measured: dict[str, Any], n: int, batch: int, policy: "Policy") -> None:
    speed, right = measured["images_per_second"], measured["accuracy"]
    epsilon = policy.certificate.promises[0].epsilon
    print_table(
        f"The network itself, on {n:,} images, on this machine, batches of {batch}",
        ["", "images per second", "accuracy %"],
        [
            ["in full", f"{speed['full']:.0f}", f"{100 * right['full']:.2f}"],
            [
                f"early exits, ε = {epsilon:g}",
                f"{speed['early']:.0f}",
                f"{100 * right['early']:.2f}",
            ],
        ],
    )
    if not policy.runs_full_model:
        print_text(f"{measured['times_faster']:.2f} times as fast.", "bold")
    print_table(
        "Where the images exited",
        ["exit", "", "% of images"],
        [
            [str(k + 1), "█" * round(BAR * share), f"{100 * share:.1f}"]
            for k, share in enumerate(measured["exit_shares"])
        ],
        left=2,
    )


def _images_figure(images: "SampleImages", exits: np.ndarray, path: Path) -> None:
    """Draw some images that took each exit, from easy to hard."""
    from swiftsure.report.figures import finished, new_figure

    n_exits, columns = int(exits.max()) + 1, 12
    shares = np.bincount(exits) / len(exits)
    figure = new_figure(columns * 0.62 + 1.2, n_exits * 0.66 + 0.5)
    figure.suptitle("Easy images exit early, hard ones stay", fontsize=10)
    axes = figure.subplots(n_exits, columns, squeeze=False)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    for exit_, row in enumerate(axes):
        label = f"exit {exit_ + 1}: {shares[exit_]:.0%}"
        row[0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=9)
        for axis, index in zip(row, np.flatnonzero(exits == exit_), strict=False):
            axis.imshow(images.images[index].transpose(1, 2, 0))
    finished(figure, path)
