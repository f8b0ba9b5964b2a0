"""Every example of every docstring runs and gives what it says."""

import doctest
import importlib
from importlib.util import find_spec
from pathlib import Path

import pytest

import swiftsure

ROOTS = [Path(swiftsure.__file__).parent]
if (zoo := find_spec("swiftsure_zoo")) is not None:
    ROOTS += map(Path, zoo.submodule_search_locations)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
EXTRAS = (
    "torch",
    "transformers",
    "safetensors",
    "sacrebleu",
    "rouge_score",
    "sentencepiece",
    "triton",
    "onnxruntime",
    "onnxscript",
    "ray",
)
"""What the optional parts of the library need; Triton comes with PyTorch for CUDA."""


def module_names():
    for root in ROOTS:
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root.parent).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = list(module_names())


def load(name):
    """Import a module of the library, or skip if an extra is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if (error.name or "").partition(".")[0] in EXTRAS or "pip install" in str(error):
            pytest.skip(f"{name} needs an extra: {error}")
        raise


@pytest.mark.parametrize("name", MODULES)
def test_examples(name, tmp_path, monkeypatch):
    module = load(name)
    monkeypatch.chdir(tmp_path)  # examples may write files
    runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    report = []
    for test in doctest.DocTestFinder().find(module, name):
        runner.run(test, out=report.append)
    assert not runner.failures, "".join(report)


def test_the_modules_are_found():
    assert {"swiftsure", "swiftsure.study.planning", "swiftsure.report.figures"} <= set(MODULES)


def test_there_are_examples_to_run():
    """Else a broken finder would pass for working examples."""
    finder = doctest.DocTestFinder()
    rooms = ("certify.bounds", "certify.calibration", "certify.controls", "curves", "records")
    for name in (*rooms, "study.evaluation", "study.planning"):
        packages = [each for each in MODULES if each.startswith(f"swiftsure.{name}")]
        found = [test for each in packages for test in finder.find(load(each))]
        assert sum(len(test.examples) for test in found) > 1, name


def test_a_wrong_example_is_noticed(tmp_path):
    """A test of the test above."""
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, None)
    runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    runner.run(test, out=lambda _: None)
    assert runner.failures == 1
