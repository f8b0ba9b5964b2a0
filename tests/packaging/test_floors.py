"""The lowest versions that are accepted have no known vulnerability that matters here."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]

FIXED = {
    "aiohttp": "3.14.3",  # CVE-2025-53643, -69223, CVE-2026-34513 to -34525, -54273, -69244
    "jinja2": "3.1.6",  # CVE-2025-27516
    "pillow": "12.3",  # CVE-2025-48379, CVE-2026-25990, -55379, -59199
    "pyarrow": "23.0.1",  # CVE-2026-25087
    "sentencepiece": "0.2.1",  # CVE-2026-1260
    "starlette": "1.3.1",  # CVE-2025-62727, CVE-2026-48710, -54282, -54283
    "torch": "2.10",  # CVE-2025-32434 and CVE-2026-24747: code run by `weights_only=True`
}
"""The first version with fixes of these vulnerabilities."""


def requirements():
    """Return every requirement of the library and its extras, except those on itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    found = [Requirement(text) for group in groups for text in group]
    return [each for each in found if not each.name.startswith("swiftsure")]


def floor(requirement):
    (lowest,) = [Version(each.version) for each in requirement.specifier if each.operator == ">="]
    return lowest


@pytest.mark.parametrize("name", FIXED)
def test_floors_are_past_the_fixes(name):
    floors = [floor(each) for each in requirements() if canonicalize_name(each.name) == name]
    assert floors
    assert min(floors) >= Version(FIXED[name])


def test_the_pinned_versions_are_accepted():
    text = (ROOT / "constraints.txt").read_text("utf-8")
    pins = {canonicalize_name(n): v for n, v in re.findall(r"^([\w.-]+)==(\S+)$", text, re.M)}
    for each in requirements():
        pin = pins.get(canonicalize_name(each.name))
        assert pin is not None, each
        assert each.specifier.contains(pin, prereleases=True), (each, pin)
