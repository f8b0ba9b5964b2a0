"""Trained networks whose weights are in this distribution."""

from swiftsure.demo.network import load_weights, prepared
from swiftsure_zoo import records
from swiftsure_zoo.networks.msdnet import MSDNet

__all__ = ["msdnet_fashion_mnist", "prepared"]


def msdnet_fashion_mnist() -> MSDNet:
    """Return an MSDNet with five exits, trained on Fashion-MNIST, in evaluation mode.

    Its inputs come from `prepared`. `swiftsure_zoo.records.record()` was measured with it.

    Examples
    --------
    >>> model = msdnet_fashion_mnist()
    >>> images = records.sample_images().images[:4]
    >>> [tuple(logits.shape) for logits in model(prepared(images))]
    [(4, 10), (4, 10), (4, 10), (4, 10), (4, 10)]
    """
    model = MSDNet(**records.description()["model"])
    return load_weights(model, records.MSDNET_FASHION_MNIST / "weights.safetensors")
