"""What importing the library loads, seen from a fresh interpreter."""

import json
import pkgutil
import subprocess
import sys

import pytest

import swiftsure

HEAVY = ["matplotlib", "numba", "numpy", "pandas", "pyarrow", "pydantic", "scipy", "torch", "typer"]
FRAMEWORKS = [
    "click",
    "jinja2",
    "matplotlib",
    "safetensors",
    "torch",
    "torchvision",
    "transformers",
    "typer",
]
ABOVE_THE_STATISTICS = (
    "cascade",
    "cli",
    "demo",
    "diffusion",
    "onnx",
    "reasoning",
    "report",
    "serve",
    "text",
    "torch",
)

STATISTICS = sorted(
    module.name
    for module in pkgutil.walk_packages(swiftsure.__path__, "swiftsure.")
    if module.name.split(".")[1] not in ABOVE_THE_STATISTICS
    and not module.name.startswith("swiftsure.run.graphs.")
)

REPORT = "import sys, json; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"


def loaded(statement):
    """Top-level packages in memory after a statement, in an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\n{REPORT}"], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout))


def test_importing_the_library_loads_nothing_heavy():
    packages = loaded("import swiftsure")
    assert "swiftsure" in packages
    assert packages.isdisjoint(HEAVY)


def test_the_statistics_load_no_framework_no_plotting_and_no_command_line():
    assert {"swiftsure.certify.bounds", "swiftsure.records.files"} <= set(STATISTICS)
    packages = loaded(f"import {', '.join(STATISTICS)}")
    assert "numpy" in packages
    assert packages.isdisjoint(FRAMEWORKS)


@pytest.mark.parametrize("name", ["calibrate", "control", "ExitRecord", "Policy"])
def test_a_name_brings_only_what_it_needs(name):
    assert loaded(f"import swiftsure; swiftsure.{name}").isdisjoint(FRAMEWORKS)


@pytest.mark.parametrize(
    ("statement", "package"),
    [("import matplotlib.pyplot", "matplotlib"), ("import typer", "typer")],
)
def test_the_check_itself_notices(statement, package):
    packages = loaded(f"import swiftsure\n{statement}")
    assert package in packages
    assert not packages.isdisjoint(HEAVY)
    assert not packages.isdisjoint(FRAMEWORKS)
