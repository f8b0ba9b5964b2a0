"""The programs of docs/guides/ray.md run."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "ray.md"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Ray's own
def test_examples_of_the_page_run(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    try:
        for code in re.findall(r"^```py\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S):
            exec(compile(code, PAGE.name, "exec"), namespace)  # noqa: S102 (our own page)
    finally:
        if "serve" in namespace:
            namespace["serve"].shutdown()
    assert namespace["record"].n == 400
    assert namespace["answer"]["id"] == "first"
