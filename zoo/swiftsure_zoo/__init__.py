"""Published early-exit networks, trained weights, records and dataset readers for Swiftsure.

We trained all of them from scratch. Accuracies are those of the last exit on test samples. Files
are records (`.parquet`) in `data/`, two of them with the network's weights in a folder beside.

| network | data | accuracy | record |
|---|---|---|---|
| `MSDNet`, 5 exits, with weights | Fashion-MNIST | 94.1 % | \
image_classification/msdnet_fashion_mnist |
| `MSDNet`, 5 exits | CIFAR-10 | 94.2 % | image_classification/msdnet_cifar10 |
| `L2WDEN`, 5 exits | CIFAR-10 | 94.0 % | image_classification/l2w_den_cifar10 |
| `MSDNet`, 5 exits | Tiny-ImageNet-100 | 70.2 % | image_classification/msdnet_tiny_imagenet_100 |
| `DViT`, 3 exits | Tiny-ImageNet-100 | 55.8 % | image_classification/dvit_tiny_imagenet_100 |
| `DynPerceiver`, 4 exits | Tiny-ImageNet-100 | 64.4 % | \
image_classification/dyn_perceiver_tiny_imagenet_100 |
| `ADPC`, 4 exits | CamVid | 62.1 % mIoU | segmentation/adp_c_camvid |
| T5, 8 decoder layers, with weights | Multi30k, de-en | 41 BLEU (2016) | calm/t5_multi30k_* |
| a decoder that thinks, 0.45 M parameters, with weights | little programs | \
see `programs` | |
| two T5, one drafts | Multi30k, de-en | | bild/t5_multi30k |
| `UViT`, 13 early exits | CIFAR-10 | | diffusion/uvit_cifar10 |
| DiT with a cache | CIFAR-10 | | diffusion/dit_cifar10_cache |

`records` finds these files; `programs.small_reasoner()` is the model that thinks. Modules are
imported on first use; records need no PyTorch. `NOTICE` lists every file and the terms of its data.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swiftsure_zoo import records
    from swiftsure_zoo.embedded import msdnet_fashion_mnist, prepared
    from swiftsure_zoo.networks.adp_c import ADPC
    from swiftsure_zoo.networks.dvit import DViT
    from swiftsure_zoo.networks.dyn_perceiver import DynPerceiver
    from swiftsure_zoo.networks.l2w_den import L2WDEN, L2WTrainer, WeightNetwork
    from swiftsure_zoo.networks.msdnet import MSDNet
    from swiftsure_zoo.networks.published import PublishedModel
    from swiftsure_zoo.networks.uvit import UViT
    from swiftsure_zoo.readers.folders import ImageFolder
    from swiftsure_zoo.readers.road_scenes import GTA5, CamVid, Cityscapes
    from swiftsure_zoo.readers.text import TextSample, cnn_dailymail, iwslt, squad

__all__ = [
    "ADPC",
    "GTA5",
    "L2WDEN",
    "CamVid",
    "Cityscapes",
    "DViT",
    "DynPerceiver",
    "ImageFolder",
    "L2WTrainer",
    "MSDNet",
    "PublishedModel",
    "TextSample",
    "UViT",
    "WeightNetwork",
    "cnn_dailymail",
    "iwslt",
    "msdnet_fashion_mnist",
    "prepared",
    "records",
    "squad",
]

_HOMES = {
    "ADPC": "networks.adp_c",
    "CamVid": "readers.road_scenes",
    "Cityscapes": "readers.road_scenes",
    "DViT": "networks.dvit",
    "DynPerceiver": "networks.dyn_perceiver",
    "GTA5": "readers.road_scenes",
    "ImageFolder": "readers.folders",
    "L2WDEN": "networks.l2w_den",
    "L2WTrainer": "networks.l2w_den",
    "MSDNet": "networks.msdnet",
    "PublishedModel": "networks.published",
    "TextSample": "readers.text",
    "UViT": "networks.uvit",
    "WeightNetwork": "networks.l2w_den",
    "cnn_dailymail": "readers.text",
    "iwslt": "readers.text",
    "msdnet_fashion_mnist": "embedded",
    "prepared": "embedded",
    "squad": "readers.text",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name in _HOMES:
        value = getattr(import_module(f"swiftsure_zoo.{_HOMES[name]}"), name)
    elif name == "records":
        value = import_module("swiftsure_zoo.records")
    else:
        raise AttributeError(f"module 'swiftsure_zoo' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
