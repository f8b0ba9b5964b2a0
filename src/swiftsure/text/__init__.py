"""Early-exit generation (CALM) and draft models (BiLD) for Hugging Face models."""

try:
    import torch as _torch  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ImportError:
    raise ImportError(
        "swiftsure.text needs PyTorch and transformers: pip install 'swiftsure[text]'."
    ) from None

from swiftsure.text.bild.decoding import Call
from swiftsure.text.bild.model import BigLittle
from swiftsure.text.bild.pair import pair_fingerprint, self_draft
from swiftsure.text.bild.results import BildOutput, BildRun
from swiftsure.text.bild.rules import DraftRule, Rollback, Speculative
from swiftsure.text.bild.sweep import sweep_pair
from swiftsure.text.calm.meta import MetaClassifier
from swiftsure.text.calm.model import CalmModel, EarlyExits, calm_fingerprint, early_exits
from swiftsure.text.calm.results import CalmOutput, Depths
from swiftsure.text.calm.rules import CalmRule, Decay
from swiftsure.text.calm.sweep import sweep
from swiftsure.text.calm.token_score import TokenScore
from swiftsure.text.calm.training import fit_exit_heads, learn_token_score, train_meta
from swiftsure.text.continuous import ContinuousBatch, Generation
from swiftsure.text.decoder import check_family
from swiftsure.text.exit_heads import ExitHeads
from swiftsure.text.families import FAMILIES, Family, Logits
from swiftsure.text.folder import load_system, save_system
from swiftsure.text.inputs import Texts

__all__ = [
    "FAMILIES",
    "BigLittle",
    "BildOutput",
    "BildRun",
    "Call",
    "CalmModel",
    "CalmOutput",
    "CalmRule",
    "ContinuousBatch",
    "Decay",
    "Depths",
    "DraftRule",
    "EarlyExits",
    "ExitHeads",
    "Family",
    "Generation",
    "Logits",
    "MetaClassifier",
    "Rollback",
    "Speculative",
    "Texts",
    "TokenScore",
    "calm_fingerprint",
    "check_family",
    "early_exits",
    "fit_exit_heads",
    "learn_token_score",
    "load_system",
    "pair_fingerprint",
    "save_system",
    "self_draft",
    "sweep",
    "sweep_pair",
    "train_meta",
]
