"""Early-exit generation with Hugging Face models (CALM), and its records."""

try:
    import torch as _torch  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ImportError:
    raise ImportError(
        "swiftsure.text needs PyTorch and transformers: pip install 'swiftsure[text]'."
    ) from None

from swiftsure.text.calm import CalmModel, EarlyExits, calm_fingerprint, early_exits
from swiftsure.text.datasets import TextSample, cnn_dailymail, squad
from swiftsure.text.families import FAMILIES, Family, register_family
from swiftsure.text.meta import MetaClassifier
from swiftsure.text.results import CalmOutput, Depths
from swiftsure.text.rules import Decay, ExitRule
from swiftsure.text.sweeping import sweep
from swiftsure.text.training import train_meta

__all__ = [
    "FAMILIES",
    "CalmModel",
    "CalmOutput",
    "Decay",
    "Depths",
    "EarlyExits",
    "ExitRule",
    "Family",
    "MetaClassifier",
    "TextSample",
    "calm_fingerprint",
    "cnn_dailymail",
    "early_exits",
    "register_family",
    "squad",
    "sweep",
    "train_meta",
]
