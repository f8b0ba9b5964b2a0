"""Every Python example of the documentation runs, page by page, as a reader would run it."""

import re
import runpy
import warnings
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
README = DOCS.parent / "README.md"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
TEXT = re.compile(
    r"^```python\n((?:(?!```).*\n)*)```\n\n```text\n((?:(?!```).*\n)*)```", re.MULTILINE
)
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
def test_a_program_prints_what_is_shown(page, capsys):
    namespace: dict[str, object] = {}
    for code, shown in TEXT.findall(page.read_text(encoding="utf-8")):
        exec(compile(code, page.name, "exec"), namespace)  # noqa: S102 (our own page)
        promise, _, rest = shown.partition("What voids this:\n...\n")
        printed = capsys.readouterr().out
        assert " ".join(printed.splitlines()[0].split()) == " ".join(promise.split())
        assert printed.endswith(rest)


LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s#]*)(#[^)\s]*)?\)")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as mkdocs makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    words = [re.sub(r"[^\w\s-]", "", each).strip().lower() for each in headings]
    return {re.sub(r"[-\s]+", "-", each) for each in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target, anchor in LINK.findall(prose):
        if target.startswith(("http", "mailto")):
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), target
        if anchor and not anchor.startswith("#swiftsure"):
            assert anchor[1:] in anchors(file), target + anchor


LONG = ("docs/reference/", "docs/concepts/mathematics.md")
"""Pages to look things up in; all others are read from start to end."""

WORDS = 2500


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_to_read_is_short(page):
    path = page.relative_to(DOCS.parent).as_posix()
    if path.startswith(LONG):
        pytest.skip("a page to look things up in")
    assert len(page.read_text(encoding="utf-8").split()) <= WORDS


def test_some_page_has_examples():
    assert any(blocks(page) for page in PAGES)
