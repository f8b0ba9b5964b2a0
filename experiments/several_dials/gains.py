"""What several dials gain over one: `python -m experiments.several_dials.gains`, about a minute.

From records that come with `swiftsure-zoo`, those that the other modules of this folder made,
and the images that come with the network. Prints, for each system and ε, cost and risk on samples
that did not calibrate.
"""

from pathlib import Path
from typing import Any

import numpy as np

import swiftsure as ss
from experiments.several_dials.compare import compare, compare_exits
from experiments.several_dials.resolution import resolutions
from experiments.tables import markdown_table
from swiftsure_zoo.records import CALM, DIFFUSION, IMAGE_CLASSIFICATION

RESULTS = Path(__file__).parent / "results"
MEASURES = ("softmax", "shortlist", "saturation")
CASCADE = (("dvit", 0), ("dyn_perceiver", 0), ("msdnet", 4))
"""Networks on Tiny ImageNet and the exit at which each is cut, from small to large."""


def main() -> None:
    for name, (record, options) in systems().items():
        for epsilon in options.pop("epsilons"):
            show(f"{name}, {record.n:,} samples, ε = {epsilon}", record, epsilon, options)


def show(title: str, record: Any, epsilon: float, options: dict[str, Any]) -> None:
    """Print the table of one system at one ε."""
    study = compare if isinstance(record, ss.ThresholdRecord) else compare_exits
    print(
        f"\n{title}\n\n{markdown_table(study(record, epsilon=epsilon, **options), 4)}", flush=True
    )


def systems() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return the record of each system and what is asked of it."""
    bild = {"along": "rollback", "cost": "large_passes", "loss": "bleu", "epsilons": (0.01, 0.02)}
    calm = {"along": "threshold", "cost": "flops", "loss": "bleu", "epsilons": (0.01, 0.02)}
    image = {"along": "threshold", "risk": "consistency", "loss": "lpips_64"}
    image["epsilons"] = (0.05, 0.1)
    sweeps = [ss.load_record(CALM / f"t5_multi30k_{each}.parquet") for each in MEASURES]
    looks = ss.load_record(RESULTS / "calm.parquet")
    found: dict[str, tuple[Any, dict[str, Any]]] = {
        "BiLD: rollback, fallback": (
            ss.load_record(RESULTS / "bild.parquet"),
            {"one": {"fallback": 0.5}, **bild},
        ),
        "BiLD: rollback, draft length": (
            ss.load_record(RESULTS / "bild_drafts.parquet"),
            {"one": {"max_draft": 10}, **bild},
        ),
        "CALM: threshold, measure": (
            ss.ThresholdRecord.across(sweeps),
            {"one": {"score": "softmax", "shortlist": None}, **calm},
        ),
        "CALM: threshold, decay, looks": (
            looks,
            {"one": {k: v for k, v in looks.setting(0).items() if k != "threshold"}, **calm},
        ),
        "DeeDiff: threshold, steps": (
            ss.load_record(RESULTS / "deediff.parquet"),
            {"one": {"n_steps": 20}, "cost": "flops", **image},
        ),
        "Cache of a DiT: threshold, warm-up": (
            ss.load_record(DIFFUSION.with_name("dit_cifar10_cache.parquet")),
            {"one": {"warm_up": 0}, "cost": "blocks", **image},
        ),
        "MSDNet: threshold, size of the image": (
            resolutions(),
            {
                "along": "threshold",
                "one": {"size": 28},
                "cost": "flops",
                "loss": "zero_one",
                "epsilons": (0.01, 0.02),
            },
        ),
        "Cascade of three networks: one threshold each": (cascade(), {"epsilons": (0.02, 0.05)}),
    }
    for file in sorted(IMAGE_CLASSIFICATION.glob("*.parquet")):
        record = ss.ExitRecord.load(file, losses=["zero_one"])
        found[f"Exits of {file.stem}: one threshold each"] = record, {"epsilons": (0.02,)}
    return found


def cascade() -> ss.ExitRecord:
    """Return the record of three networks on the same images, each after the one before it."""
    parts = [
        (ss.ExitRecord.load(IMAGE_CLASSIFICATION / f"{name}_tiny_imagenet_100.parquet"), k)
        for name, k in CASCADE
    ]
    flops = [float(record.costs["flops"][k]) for record, k in parts]
    early = [record.confidences["top1"][:, k] for record, k in parts[:-1]]
    return ss.ExitRecord(
        confidences={"top1": np.column_stack(early)},
        losses={"zero_one": np.column_stack([r.losses["zero_one"][:, k] for r, k in parts])},
        costs={"flops": np.cumsum(flops)},
        full_costs={"flops": flops[-1]},
        ids=parts[0][0].ids,
    )


if __name__ == "__main__":
    main()
