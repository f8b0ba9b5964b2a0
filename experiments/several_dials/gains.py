"""What several dials gain over one: `python -m experiments.several_dials.gains`.

From records that come with `swiftsure-assets` and, for drafts, the one that
`experiments.several_dials.bild` made. Samples are drawn from each record with replacement.
"""

from pathlib import Path

import numpy as np

import swiftsure as ss
from experiments.several_dials.compare import compare
from experiments.tables import markdown_table
from swiftsure import assets

HERE = Path(__file__).parent
MEASURES = ("softmax", "shortlist", "saturation")


def main() -> None:
    drafts = ss.ThresholdRecord.load(HERE / "results" / "bild.parquet")
    today = {name: drafts.setting(0)[name] for name in drafts.dials if name != "rollback"}
    for epsilon in (0.005, 0.01, 0.02):
        rows = compare(
            drafts, along="rollback", one=today, cost="large_passes", epsilon=epsilon, loss="bleu"
        )
        print(
            f"\nBiLD, {drafts.n:,} sentences, ε = {epsilon}\n\n{markdown_table(rows, 3)}",
            flush=True,
        )
    sweeps = [
        ss.ThresholdRecord.load(assets.CALM / f"t5_multi30k_{measure}.parquet")
        for measure in MEASURES
    ]
    calm = ss.ThresholdRecord.across(sweeps)
    calm_today = {"score": "softmax", "shortlist": None}
    for epsilon in (0.01, 0.02, 0.05):
        rows = compare(
            calm, along="threshold", one=calm_today, cost="flops", epsilon=epsilon, loss="bleu"
        )
        for row in rows:
            row["flops"] /= 1e6
        print(
            f"\nCALM, {calm.n:,} sentences, ε = {epsilon}\n\n{markdown_table(rows, 3)}", flush=True
        )
    print(f"\nA threshold for each exit, ε = 0.02\n\n{markdown_table(exits(), 1)}")


def exits(splits: int = 10, n: int = 1000, n_pilot: int = 300) -> list[dict[str, object]]:
    """Return the FLOPs saved (%) on test samples, with one threshold and with one per exit."""
    rows = []
    for file in sorted(assets.IMAGE_CLASSIFICATION.glob("*.parquet")):
        record = ss.ExitRecord.load(file, losses=["zero_one"])
        rng, saved = np.random.default_rng(0), {"shared threshold": [], "threshold per exit": []}
        for _ in range(splits):
            order = rng.permutation(record.n)
            test = record.take(order[n:])
            path = ss.Path.pareto(record.take(order[:n_pilot]), "gap", "zero_one")
            for first, each, name in zip((0, n_pilot), (None, path), saved, strict=True):
                part = record.take(order[first:n])
                policy = ss.calibrate(part, loss="zero_one", epsilon=0.02, path=each)
                saved[name].append(100 * policy.evaluate(test).saving)
        rows.append({"record": file.stem} | {k: float(np.mean(v)) for k, v in saved.items()})
    return rows


if __name__ == "__main__":
    main()
