"""The notebooks run from start to end, and hold small outputs.

To write their outputs again: `.venv/bin/jupyter execute --inplace docs/notebooks/*.ipynb`.
"""

import os
import warnings
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
KILOBYTE = 1000


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


def test_there_are_notebooks():
    assert {path.stem for path in NOTEBOOKS} == {
        "arrays",
        "hugging-face",
        "llm-cascade",
        "reasoning",
    }


def test_outputs_are_kept_and_small(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert "text/html" in kinds  # the card of a policy
    assert not any(kind.startswith("image/") for kind in kinds)
    assert not any(output.output_type == "error" for output in outputs)
    assert path.stat().st_size < 40 * KILOBYTE


def test_colab_installs_the_library_first(path):
    first = code_cells(nbformat.read(path, as_version=4))[0]
    assert "%pip install" in first.source
    assert "swiftsure" in first.source


@pytest.mark.slow
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    if path.stem == "hugging-face":
        pytest.importorskip("transformers")
    sources = [str(ROOT / "src"), str(ROOT / "zoo"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sources))
    notebook = nbformat.read(path, as_version=4)
    shown = [bool(cell.outputs) for cell in code_cells(notebook)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Jupyter's own packages
        resources = {"metadata": {"path": str(tmp_path)}}
        client = nbclient.NotebookClient(
            notebook, timeout=300, kernel_name="python3", resources=resources
        )
        client.execute()
    for cell, before in zip(code_cells(notebook), shown, strict=True):
        assert cell.outputs or not before
