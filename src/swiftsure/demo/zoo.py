"""The zoo where a command needs it: `swiftsure-zoo` is a distribution of its own."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, cast

from swiftsure import demo

if TYPE_CHECKING:
    from swiftsure.demo import SampleImages
    from swiftsure.records import ExitRecord
    from swiftsure.torch import StagedModel

__all__ = ["Shown", "installed", "shown", "shown_network", "zoo_records"]


class Shown(Protocol):
    """What was measured with a network: the functions of `swiftsure.demo`."""

    def record(self) -> "ExitRecord":
        """Return the record on the whole test set."""

    def calibration_record(self) -> "ExitRecord":
        """Return the record without the sample images."""

    def description(self) -> dict[str, Any]:
        """Return the network's description."""

    def sample_images(self) -> "SampleImages":
        """Return images to run the network on."""


def installed() -> bool:
    """Return whether `swiftsure-zoo` is installed."""
    return find_spec("swiftsure_zoo") is not None


def zoo_records() -> Any:
    """Return the module `swiftsure_zoo.records`.

    Raises
    ------
    ModuleNotFoundError
        If `swiftsure-zoo` is not installed; says how to install it.
    """
    if not installed():
        raise ModuleNotFoundError(
            'This needs trained networks and their records: pip install "swiftsure[zoo]"',
            name="swiftsure_zoo",
        )
    return import_module("swiftsure_zoo.records")


def shown(small: bool = False) -> Shown:
    """Return what was measured with the zoo's MSDNet, or with the small network.

    The small network is used if it is asked for, or if the zoo is not installed.
    """
    return demo if small or not installed() else cast(Shown, zoo_records())


def shown_network(small: bool = False) -> "StagedModel":
    """Return the network of `shown(small)`, with exits; needs PyTorch."""
    if small or not installed():
        from swiftsure.demo.network import small_exits

        return small_exits()
    from swiftsure_zoo import msdnet_fashion_mnist

    return msdnet_fashion_mnist()
