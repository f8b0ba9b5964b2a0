"""Draw the same images at every ε with their costs, from the root of the repository:
`python -m experiments.diffusion.picture uvit_cifar10`.

Reads the results of `records.py` and `recognised.py`; writes NAME_levels_LOSS.png.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image

from experiments.diffusion.train import HERE


def captions(report: dict[str, Any], loss: str) -> list[str]:
    """Return a caption per ε: layers run of the full model's, and the share recognised."""
    found = report["record"]
    known = np.asarray([np.inf if t is None else t for t in found["thresholds"]])
    lines = []
    for level, threshold in report["levels"][loss].items():
        column = 0 if threshold is None else int(np.argmin(abs(known - threshold)))
        line = (
            f"ε = {float(level):g}\n{found['layers'][column]:.1f} layers of {found['layers'][0]:g}"
        )
        if "recognised" in report:
            line += f"\n{100 * report['recognised'][loss][level]:.0f} % recognised"
        lines.append(line)
    return lines


def draw(report: dict[str, Any], loss: str, sheet: Path, target: Path) -> None:
    """Draw a sheet with its captions."""
    with Image.open(sheet) as image:
        pixels = np.asarray(image.convert("RGB"))
    tile = report["recipe"]["model"]["image_size"]
    rows, columns = (side // tile for side in pixels.shape[:2])
    lines = captions(report, loss)
    if len(lines) != rows:
        raise ValueError(
            f"{sheet} has {rows} rows, but the report has {len(lines)} values of ε for {loss}"
        )
    figure, axes = plt.subplots(figsize=(1.6 + 0.75 * columns, 0.75 * rows), layout="constrained")
    axes.imshow(pixels, interpolation="nearest")
    axes.set_yticks(tile * (np.arange(rows) + 0.5), lines, fontsize=9)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.savefig(target, dpi=110, bbox_inches="tight", pad_inches=0.05)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="of the recipe")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--loss", help="loss of the sheet; the last in the report by default")
    arguments = parser.parse_args()
    report = json.loads((arguments.results / f"{arguments.name}.json").read_text())
    loss = arguments.loss or list(report["levels"])[-1]
    sheet = arguments.results / f"{arguments.name}_levels_{loss}.webp"
    target = sheet.with_suffix(".png")
    draw(report, loss, sheet, target)
    print(target)


if __name__ == "__main__":
    main()
