"""Exit records of trained networks on the test part, from the root of the repository:
`python -m experiments.segmentation.records --data FOLDER`.

Reads NAME.safetensors and NAME.json in the folder of results, for the given names or else for all,
and writes NAME.parquet (all losses, all nine scores), NAME.npz (predictions and confidence maps of
the scenes with the highest and lowest confidence at the first exit, for the figure), and the test
scores into NAME.json.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader

from experiments.commands import device as best_device
from experiments.commands import load_weights
from experiments.segmentation.data import TEST_PART, in_memory, scenes
from experiments.segmentation.scenes import SHOWN_SIZE, shown_scenes
from experiments.segmentation.train import HERE, mean_ious
from swiftsure import ExitRecord
from swiftsure.torch import collect
from swiftsure.torch.scoring import IMAGE_SCORES, top1
from swiftsure_zoo import ADPC
from swiftsure_zoo.readers.road_scenes import RoadScenes


def load(path: Path, recipe: dict[str, Any]) -> nn.Module:
    """Return a trained or fine-tuned network, in single precision."""
    if "start" in recipe:
        return load_weights(ADPC.from_hyperparameters(recipe["start"]), path)
    return load_weights(ADPC(**recipe["model"]), path)


@torch.inference_mode()
def shown(model: nn.Module, data: RoadScenes, index: int, device: str) -> dict[str, np.ndarray]:
    """Return predictions and confidences of a scene at all exits, at a small size."""
    image = data[index][0]
    maps = torch.stack([output[0] for output in model(image[None].to(device))])
    maps = interpolate(maps, size=SHOWN_SIZE, mode="bilinear", align_corners=False)
    return {
        "predictions": maps.argmax(dim=1).cpu().numpy().astype(np.uint8),
        "confidences": (255 * top1(maps)).round().cpu().numpy().astype(np.uint8),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of recipes; all in the folder by default")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--data", type=Path, required=True)
    arguments = parser.parse_args()
    device = best_device()
    files = [arguments.results / f"{name}.json" for name in arguments.names]
    for file in files or sorted(arguments.results.glob("*.json")):
        report = json.loads(file.read_text())
        recipe = report["recipe"]
        data = scenes(recipe, arguments.data, TEST_PART[recipe["data"]["name"]])
        model = load(file.with_suffix(".safetensors"), recipe).to(device)
        record: ExitRecord = collect(
            model,
            DataLoader(data, batch_size=4, collate_fn=data.collate),
            losses=["miou", "miscoverage", "pixel_brier"],
            scores=list(IMAGE_SCORES),
        )
        record.save(file.with_suffix(".parquet"))
        both = shown_scenes(record)
        arrays = {
            f"{name}_{key}": array
            for name, row in both.items()
            for key, array in shown(model, data, row, device).items()
        }
        np.savez_compressed(file.with_suffix(".npz"), **arrays)
        part = in_memory(data, device)
        report["test_miou"] = mean_ious(model, part, recipe["data"]["n_classes"])
        report["mean_image_miou"] = (1 - record.losses["miou"].mean(axis=0)).round(4).tolist()
        report["flops"] = record.costs["flops"].tolist()
        report["shown"] = {name: data.ids[row] for name, row in both.items()}
        file.write_text(json.dumps(report, indent=2) + "\n")
        print(f"{file.stem}: mIoU {', '.join(f'{100 * x:.2f}' for x in report['test_miou'])} %")


if __name__ == "__main__":
    main()
