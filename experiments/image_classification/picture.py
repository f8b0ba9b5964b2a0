"""Draw the picture of the README: `python -m experiments.image_classification.picture`.

It needs PyTorch to run the network that comes with the library on its sample images.
"""

from pathlib import Path

import numpy as np
import torch

import swiftsure as ss
from swiftsure import demo
from swiftsure.demo.network import prepared, trained_exits
from swiftsure.exits import exit_indices
from swiftsure.report.figures import finished, new_figure
from swiftsure.torch import EarlyExit

OUTPUT = Path(__file__).resolve().parents[2] / "docs" / "img" / "demo.png"
EPSILON, N, COLUMNS = 0.01, 2000, 9


def main() -> None:
    calibration, rest = demo.record().split(N, seed=0)
    policy = ss.calibrate(calibration, loss="zero_one", epsilon=EPSILON)
    confidences, losses = rest.confidences["top1"], rest.losses["zero_one"]
    flops = rest.costs["flops"] / rest.full_costs["flops"]
    rows = np.arange(rest.n)
    points = []
    for threshold in [1.1, *np.linspace(1, 0.3, 400)]:
        exits = exit_indices(confidences, np.full(3, threshold, np.float32))
        points.append((100 * (1 - flops[exits].mean()), 100 * (1 - losses[rows, exits].mean())))
    saved, accuracy = np.array(points).T
    chosen = exit_indices(confidences, policy.thresholds)
    here = 100 * (1 - flops[chosen].mean()), 100 * (1 - losses[rows, chosen].mean())
    full = 100 * (1 - losses[:, -1].mean())

    figure = new_figure(11.5, 3.9)
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.25))
    axis = left.subplots()
    axis.plot(saved, accuracy, color="#3b5bdb", lw=2)
    axis.axhline(full - 100 * EPSILON, color="#868e96", ls="--", lw=1)
    axis.text(
        1, full - 100 * EPSILON - 0.12, "1 point below the full network", va="top", fontsize=9
    )
    axis.plot(*here, "o", color="#e8590c", ms=9)
    axis.annotate(
        f"certified: saves {here[0]:.0f} %,\nloses {full - here[1]:.1f} points",
        here,
        xytext=(here[0] - 6, here[1] - 1.2),
        ha="right",
        color="#e8590c",
        arrowprops={"arrowstyle": "-", "color": "#e8590c"},
    )
    axis.set(xlabel="compute saved (% of FLOPs)", ylabel="accuracy (%)", xlim=(0, 100))
    axis.set_ylim(full - 4.5, full + 0.5)

    sample = demo.sample_images()
    with torch.inference_mode():
        exits = EarlyExit(trained_exits(), policy)(prepared(sample.images)).exits.numpy()
    axes = right.subplots(4, COLUMNS)
    for exit_, row in enumerate(axes):
        share = (exits == exit_).mean()
        label = f"exit {exit_ + 1}: {share:.0%} of images,\n{flops[exit_]:.0%} of the compute"
        row[0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=9)
        for axis, index in zip(row, np.flatnonzero(exits == exit_), strict=False):
            axis.imshow(sample.images[index].transpose(1, 2, 0))
        for axis in row:
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
    right.suptitle("Easy images exit early, hard ones stay", fontsize=11)
    finished(figure, OUTPUT)
    print(f"Wrote {OUTPUT}: {policy.evaluate(rest)}")


if __name__ == "__main__":
    main()
