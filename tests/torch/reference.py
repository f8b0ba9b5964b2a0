"""Published networks: facts about them, which stand beside the project where they are at hand."""

import json
from pathlib import Path

import pytest
import torch

__all__ = ["Reference", "images", "on_meta"]

FOLDER = Path(__file__).resolve().parents[2].parent / "shared" / "reference"


class Reference:
    """What is known of one published network.

    `needed` marks tests that cannot do without it; they are skipped where it is absent.
    """

    def __init__(self, network):
        self.folder = FOLDER / network
        self.needed = pytest.mark.skipif(
            not self.folder.is_dir(),
            reason=f"the published networks' tensors are not at {self.folder}",
        )

    def facts(self, name):
        return json.loads((self.folder / name).read_text(encoding="utf-8"))

    def configurations(self, key="configurations"):
        return self.facts("config.json")[key] if self.folder.is_dir() else {}

    def parity(self, name="parity_small"):
        """Hyperparameters, weights, and tensors that went in and came out."""
        load = pytest.importorskip("safetensors.torch").load_file
        tensors = load(self.folder / f"{name}.safetensors")
        weights = {key[3:]: value for key, value in tensors.items() if key.startswith("sd.")}
        return self.facts(f"{name}.json")["hyperparameters"], weights, tensors


def images(n, height=32, width=None):
    """Noise of rising contrast: untrained networks tell hardly anything else apart."""
    size = (n, 3, height, width or height)
    noise = torch.randn(size, generator=torch.Generator().manual_seed(1))
    return noise * torch.linspace(0.2, 5, n).view(n, 1, 1, 1)


def on_meta(build, *args, **options):
    """Build without memory or random numbers: shapes alone."""
    with torch.device("meta"):
        return build(*args, **options)
