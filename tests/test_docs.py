"""Every Python example of the documentation runs, page by page, as a reader would run it."""

import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
GALLERY = sorted((DOCS / "gallery").glob("*.py"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda page: page.stem)
def test_examples_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
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
    certified = re.search("exits at the first of|runs at threshold", capsys.readouterr().out)
    assert certified


def test_the_gallery_shows_every_program():
    page = (DOCS / "guides" / "gallery.md").read_text(encoding="utf-8")
    assert GALLERY
    assert all(f'--8<-- "{script.name}"' in page for script in GALLERY)


def test_some_page_has_examples():
    assert any(blocks(page) for page in PAGES)
