"""Settings shared by the tests of generation, which need PyTorch and transformers."""

from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("torch") is None or find_spec("transformers") is None:
    # All but the one test that is skipped and says why.
    found = Path(__file__).parent.rglob("test_*.py")
    collect_ignore = [str(path) for path in found if path.name != "test_extra.py"]
else:
    import torch

    torch.set_num_threads(1)  # several workers share the cores

    from swiftsure.text.calm import steps

    @pytest.fixture(params=["compacted", "all rows"])
    def way(request, monkeypatch):
        """Both ways to run a block for some rows only."""
        monkeypatch.setattr(steps, "COMPACT_FROM", 2)
        monkeypatch.setattr(steps, "COMPACT_BELOW", 1.0 if request.param == "compacted" else -1.0)
