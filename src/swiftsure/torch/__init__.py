"""Run early-exit models in PyTorch, so that exits save actual compute."""

try:
    import torch as _torch  # noqa: F401
except ImportError:
    raise ImportError("swiftsure.torch needs PyTorch: pip install 'swiftsure[torch]'.") from None

from swiftsure.run.graphs.recorder import CaptureLimits
from swiftsure.torch.audit import Audit, Auditor
from swiftsure.torch.cascade import Cascade
from swiftsure.torch.collecting import collect
from swiftsure.torch.costs import exit_flops, exit_seconds
from swiftsure.torch.cutting import cut
from swiftsure.torch.exit_losses import exit_losses
from swiftsure.torch.fingerprinting import fingerprint
from swiftsure.torch.heads import attach_heads
from swiftsure.torch.measuring import Timings, measure
from swiftsure.torch.results import ExitOutput, InvalidSampleError
from swiftsure.torch.runtime import EarlyExit
from swiftsure.torch.staged import Scored, Staged, StagedModel, check
from swiftsure.torch.stream import Stream, StreamError
from swiftsure.torch.tasks import absolute_error
from swiftsure.torch.temperature import fit_temperatures
from swiftsure.torch.training import EarlyStopping, train_heads

__all__ = [
    "Audit",
    "Auditor",
    "CaptureLimits",
    "Cascade",
    "EarlyExit",
    "EarlyStopping",
    "ExitOutput",
    "InvalidSampleError",
    "Scored",
    "Staged",
    "StagedModel",
    "Stream",
    "StreamError",
    "Timings",
    "absolute_error",
    "attach_heads",
    "check",
    "collect",
    "cut",
    "exit_flops",
    "exit_losses",
    "exit_seconds",
    "fingerprint",
    "fit_temperatures",
    "measure",
    "train_heads",
]
