"""Every Python example of the documentation runs, page by page, as a reader would run it."""

import re
import runpy
import warnings
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
README = DOCS.parent / "README.md"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
TEXT = re.compile(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
GALLERY = sorted((DOCS / "gallery").glob("*.py"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


NEEDS = ("accelerate", "lightning", "torch", "transformers")
"""Packages that only pages about them use."""


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda page: page.stem)
def test_examples_of_a_page_run(page, tmp_path, monkeypatch):
    for package in NEEDS:
        if any(re.search(rf"(import|from) {package}\b", code) for code in blocks(page)):
            pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    if page.stem == "training":  # other libraries' loops warn of themselves
        warnings.simplefilter("ignore")
    namespace: dict[str, object] = {}
    for code in blocks(page):
        exec(compile(code, page.name, "exec"), namespace)  # noqa: S102 (our own pages)


@pytest.mark.parametrize("script", GALLERY, ids=lambda script: script.stem)
def test_a_program_of_the_gallery_runs(script, tmp_path, monkeypatch, capsys):
    for package in ("torch", "transformers"):
        if package in script.read_text(encoding="utf-8"):
            pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    certified = re.search(
        "exits at the first of|stops thinking at|runs at threshold", capsys.readouterr().out
    )
    assert certified


def test_the_gallery_shows_every_program():
    page = (DOCS / "guides" / "gallery.md").read_text(encoding="utf-8")
    assert GALLERY
    assert all(f'--8<-- "{script.name}"' in page for script in GALLERY)


@pytest.mark.parametrize("page", [README, DOCS / "index.md"], ids=lambda page: page.stem)
def test_the_first_program_prints_what_is_shown(page, capsys):
    code, shown = TEXT.search(page.read_text(encoding="utf-8")).groups()
    exec(compile(code, page.name, "exec"), {})  # noqa: S102 (our own page)
    promise, _, rest = shown.partition("What voids this:\n...\n")
    printed = capsys.readouterr().out
    assert " ".join(printed.splitlines()[0].split()) == " ".join(promise.split())
    assert printed.endswith(rest)


def test_some_page_has_examples():
    assert any(blocks(page) for page in PAGES)
