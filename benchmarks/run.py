"""Run the benchmarks: `python benchmarks/run.py [topic ...] [--clock cpu] [--json FILE]`.

Topics: control, million, memory, evaluate, monitor, import, runtime, models, segmentation,
hugging_face, calm, bild, diffusion, onnx, ray. Each number is shown with its target. Missed targets
are listed at the end and do not make the run fail.
"""

import argparse
import importlib
import time
from pathlib import Path

from measure import CLOCKS, Result, show, use_clock, write
from rich.console import Console

TOPICS = {
    "control": "control",
    "million": "million",
    "memory": "memory",
    "evaluate": "evaluate",
    "monitor": "monitor",
    "import": "imports",
    "runtime": "runtime",
    "models": "models",
    "segmentation": "segmentation",
    "hugging_face": "hugging_face",
    "calm": "calm",
    "bild": "bild",
    "diffusion": "diffusion",
    "onnx": "onnx_stages",
    "ray": "ray_scaling",
}
"""Topics, and the modules that measure them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("topics", nargs="*", metavar="topic", help=", ".join(TOPICS))
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: for a machine that is busy otherwise"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    arguments = parser.parse_args()
    for topic in arguments.topics:
        if topic not in TOPICS:
            parser.error(f"topic must be one of: {', '.join(TOPICS)}; but got {topic!r}")

    use_clock(arguments.clock)
    console = Console()
    start = time.perf_counter()
    results: dict[str, list[Result]] = {}
    for topic in arguments.topics or TOPICS:
        module = importlib.import_module(TOPICS[topic])
        results[topic] = module.run()
        show(module.TITLE, results[topic], console)
    if arguments.json:
        write(arguments.json, results)
    missed = [
        f"{topic}: {result.what}: {result.number} (target {result.target})"
        for topic, found in results.items()
        for result in found
        if result.met is False
    ]
    print(f"\n{time.perf_counter() - start:.0f} s in all; measured by the {arguments.clock} clock.")
    print("Missed: " + "; ".join(missed) if missed else "Every target is met.")


if __name__ == "__main__":
    main()
