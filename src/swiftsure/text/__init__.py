"""Generation with Hugging Face models, early exits (CALM) or drafts (BiLD), and its records."""

try:
    import torch as _torch  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ImportError:
    raise ImportError(
        "swiftsure.text needs PyTorch and transformers: pip install 'swiftsure[text]'."
    ) from None

from swiftsure.text.bild import BigLittle
from swiftsure.text.bild_decoding import Call
from swiftsure.text.bild_models import pair_fingerprint, self_draft
from swiftsure.text.bild_results import BildOutput, BildRun
from swiftsure.text.bild_rules import DraftRule, Rollback, Speculative
from swiftsure.text.bild_sweep import sweep_pair
from swiftsure.text.calm import CalmModel, EarlyExits, early_exits
from swiftsure.text.datasets import TextSample, cnn_dailymail, iwslt, squad
from swiftsure.text.exit_heads import ExitHeads
from swiftsure.text.families import FAMILIES, Family, register_family
from swiftsure.text.meta import MetaClassifier
from swiftsure.text.promised import calm_fingerprint
from swiftsure.text.results import CalmOutput, Depths
from swiftsure.text.rules import Decay, ExitRule
from swiftsure.text.sweeping import sweep
from swiftsure.text.training import fit_exit_heads, train_meta

__all__ = [
    "FAMILIES",
    "BigLittle",
    "BildOutput",
    "BildRun",
    "Call",
    "CalmModel",
    "CalmOutput",
    "Decay",
    "Depths",
    "DraftRule",
    "EarlyExits",
    "ExitHeads",
    "ExitRule",
    "Family",
    "MetaClassifier",
    "Rollback",
    "Speculative",
    "TextSample",
    "calm_fingerprint",
    "cnn_dailymail",
    "early_exits",
    "fit_exit_heads",
    "iwslt",
    "pair_fingerprint",
    "register_family",
    "self_draft",
    "squad",
    "sweep",
    "sweep_pair",
    "train_meta",
]
