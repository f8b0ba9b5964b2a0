"""Settings shared by the tests of generation, which need PyTorch and transformers."""

from importlib.util import find_spec
from pathlib import Path

if find_spec("torch") is None or find_spec("transformers") is None:
    # All but the one test that is skipped and says why.
    found = Path(__file__).parent.glob("test_*.py")
    collect_ignore = [path.name for path in found if path.name != "test_extra.py"]
else:
    import torch

    torch.set_num_threads(1)  # several workers share the cores
