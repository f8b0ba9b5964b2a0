"""Write the paper's tables and figures: `python -m experiments.reproduce [TASK ...]`.

All tasks run by default; a task whose data is missing is skipped. Each writes into
experiments/TASK/results, or into FOLDER/TASK with `--output FOLDER`.
"""

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.bild.reproduce import bild
from experiments.calm.reproduce import calm
from experiments.calm_cnndm.reproduce import calm_cnndm
from experiments.crc.reproduce import crc
from experiments.diffusion.reproduce import diffusion
from experiments.image_classification.reproduce import image_classification
from experiments.learned_score.reproduce import learned_score
from experiments.llm_pairs.reproduce import llm_pairs
from experiments.reasoning.reproduce import reasoning
from experiments.segmentation.reproduce import segmentation
from experiments.studies import StudyOptions
from experiments.tables import print_rows

__all__ = ["TASKS", "main"]

TASKS: dict[str, Callable[..., Any]] = {
    "image_classification": image_classification,
    "segmentation": segmentation,
    "calm": calm,
    "calm_cnndm": calm_cnndm,
    "diffusion": diffusion,
    "bild": bild,
    "llm_pairs": llm_pairs,
    "reasoning": reasoning,
    "learned_score": learned_score,
    "crc": crc,
}
LOSSES = {"calm": ("bleu", "rouge_l")}
"""Losses of tasks that the paper studies with several."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run tasks; return the exit status."""
    parser = argparse.ArgumentParser("python -m experiments.reproduce", description=__doc__)
    # Not `choices=`, which argparse also checks against the empty default.
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--output", type=Path, help="folder for the results")
    parser.add_argument("--data", type=Path, help="record, or folder of records, of one task")
    parser.add_argument("--risk", help="gap or consistency")
    parser.add_argument("--loss", help="a loss of the records")
    parser.add_argument("--n", type=int, dest="n_calibration", help="calibration samples")
    parser.add_argument("--splits", type=int, help="random splits")
    parser.add_argument("--draws", type=int, help="calibration sets drawn to test the promises")
    parser.add_argument("--delta", type=float, help="probability of failure")
    parser.add_argument("--seed", type=int)
    given = {k: v for k, v in vars(parser.parse_args(arguments)).items() if v is not None}
    tasks, output = given.pop("tasks") or list(TASKS), given.pop("output", None)
    for task in tasks:
        if task not in TASKS:
            parser.error(f"there is no task {task!r}; the tasks are {', '.join(TASKS)}")
        known = {*inspect.signature(TASKS[task]).parameters, *StudyOptions.__annotations__}
        unknown = given.keys() - known
        if unknown:
            parser.error(f"{task} does not take {', '.join(sorted(unknown))}")
    if "data" in given and len(tasks) != 1:
        parser.error("--data needs exactly one TASK")
    status = 0
    for task in tasks:
        folder = Path(__file__).parent / task / "results" if output is None else output / task
        try:
            _reproduce(task, given, folder)
        except FileNotFoundError as error:
            print(f"Skipped {task}: {error}", flush=True)
            status = 1 if len(tasks) == 1 else status
        except (ValueError, ModuleNotFoundError) as error:
            parser.error(f"{task}: {error}")
    return status


def _reproduce(task: str, given: dict[str, Any], folder: Path) -> None:
    choices = [given] if "loss" in given else [{"loss": loss} for loss in LOSSES.get(task, ())]
    for choice in choices or [{}]:
        result = TASKS[task](**given | choice)
        for title, rows in result.tables().items():
            print_rows(title, rows)
        for file in result.write(folder):
            print(f"Wrote {file}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
