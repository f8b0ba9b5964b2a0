"""Published early-exit networks as staged models; they can load their authors' weights."""

from swiftsure.torch.models.adp_c import ADPC
from swiftsure.torch.models.dvit import DViT
from swiftsure.torch.models.dyn_perceiver import DynPerceiver
from swiftsure.torch.models.embedded import (
    embedded_msdnet,
    embedded_small_exits,
    embedded_small_network,
    prepared,
)
from swiftsure.torch.models.l2w_den import L2WDEN, L2WTrainer, WeightNetwork
from swiftsure.torch.models.msdnet import MSDNet
from swiftsure.torch.models.published import PublishedModel
from swiftsure.torch.models.uvit import UViT

__all__ = [
    "ADPC",
    "L2WDEN",
    "DViT",
    "DynPerceiver",
    "L2WTrainer",
    "MSDNet",
    "PublishedModel",
    "UViT",
    "WeightNetwork",
    "embedded_msdnet",
    "embedded_small_exits",
    "embedded_small_network",
    "prepared",
]
