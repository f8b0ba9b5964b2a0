"""Early-exit diffusion (DeeDiff): generation, training and sweeps."""

try:
    import torch as _torch  # noqa: F401
except ImportError:
    raise ImportError(
        "swiftsure.diffusion needs PyTorch: pip install 'swiftsure[torch]'."
    ) from None

from swiftsure.diffusion.deediff import DeeDiff
from swiftsure.diffusion.guidance import Guided
from swiftsure.diffusion.image_losses import compare_images
from swiftsure.diffusion.lpips import Lpips
from swiftsure.diffusion.network import DiffusionNetwork
from swiftsure.diffusion.results import Generated
from swiftsure.diffusion.rules import DeeDiffRule
from swiftsure.diffusion.schedules import DDIM, DDPM, Sampler, Schedule
from swiftsure.diffusion.sweeping import pilot_thresholds, sweep
from swiftsure.diffusion.training import DeeDiffLosses, deediff_losses

__all__ = [
    "DDIM",
    "DDPM",
    "DeeDiff",
    "DeeDiffLosses",
    "DeeDiffRule",
    "DiffusionNetwork",
    "Generated",
    "Guided",
    "Lpips",
    "Sampler",
    "Schedule",
    "compare_images",
    "deediff_losses",
    "pilot_thresholds",
    "sweep",
]
