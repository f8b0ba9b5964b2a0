"""A text system in one folder of safetensors and JSON: models, tokenizer and policy.

config.json, model.safetensors, tokenizer.json, ...    the model, as transformers saves it
draft/                                                 the draft model of a pair, likewise
classifier.safetensors, exit_heads.safetensors         what a CALM model may have
policy.json                                            the policy
text.json                                              the kind of system, and a hash of each file
"""

import hashlib
import os
from json import dumps
from pathlib import Path
from typing import Any

from swiftsure._lib.files import json_checksum, read_json, write_text
from swiftsure.certify.policy import Policy
from swiftsure.run.graphs.recorder import CaptureLimits
from swiftsure.text.bild.model import BigLittle
from swiftsure.text.calm.meta import MetaClassifier
from swiftsure.text.calm.model import CalmModel
from swiftsure.text.calm.token_score import TokenScore
from swiftsure.text.exit_heads import ExitHeads

__all__ = ["MARK", "load_system", "save_system"]

FORMAT, VERSION = "swiftsure-text", 1
MARK, POLICY, DRAFT = "text.json", "policy.json", "draft"
CLASSIFIER, HEADS = "classifier.safetensors", "exit_heads.safetensors"


def save_system(
    system: CalmModel | BigLittle, tokenizer: Any, folder: str | os.PathLike[str]
) -> None:
    """Write a system with a policy, and its tokenizer, to a new folder for `swiftsure serve`.

    Raises
    ------
    ValueError
        If the system has no policy, or the folder is not empty.
    """
    if system.policy is None:
        raise ValueError("`system` must have a policy: a threshold alone promises nothing.")
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    if any(place.iterdir()):
        raise ValueError(f"`folder` must be empty, but {place} is not.")
    if isinstance(system, CalmModel):
        system.model.save_pretrained(place)
        for name, part in ((CLASSIFIER, system.classifier), (HEADS, system.heads)):
            if part is not None:
                part.save(place / name)
    else:
        system.large.save_pretrained(place)
        system.small.save_pretrained(place / DRAFT)
    tokenizer.save_pretrained(place)
    system.policy.save(place / POLICY)
    files = sorted(each for each in place.rglob("*") if each.is_file())
    content = {
        "format": FORMAT,
        "version": VERSION,
        "system": "calm" if isinstance(system, CalmModel) else "bild",
        "files": {each.relative_to(place).as_posix(): _sha256(each) for each in files},
    }
    write_text(place / MARK, dumps({**content, "checksum": json_checksum(content)}, indent=2))


def load_system(
    folder: str | os.PathLike[str],
    *,
    device: str | None = None,
    capture: bool | CaptureLimits = False,
    compile: bool = False,  # noqa: A002 (what torch calls it)
) -> tuple[CalmModel | BigLittle, Any]:
    """Return the system in a folder, and its tokenizer; `capture` and `compile` are the system's.

    Raises
    ------
    ValueError
        If a file is missing or damaged.
    """
    from transformers import AutoTokenizer

    place = Path(folder)
    content = read_json(place / MARK, "a text system", FORMAT, VERSION)
    if content.pop("checksum", None) != json_checksum(content):
        raise ValueError(f"{place / MARK} is damaged: its checksum differs.")
    for name, expected in content["files"].items():
        file = place / name
        if not file.is_file() or _sha256(file) != expected:
            what = "damaged: its hash differs" if file.is_file() else "missing"
            raise ValueError(f"{file} is {what}; save the folder again.")
    files = content["files"]
    policy = Policy.load(place / POLICY)
    model = _model(place, device)
    tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True)
    if content["system"] == "bild":
        small = _model(place / DRAFT, device)
        return BigLittle(model, small, policy, capture=capture, compile=compile), tokenizer
    kind: Any = TokenScore if policy.settings.get("score") == "learned" else MetaClassifier
    classifier = kind.load(place / CLASSIFIER) if CLASSIFIER in files else None
    heads = ExitHeads.load(place / HEADS) if HEADS in files else None
    if device is not None:
        classifier = None if classifier is None else classifier.to(device)
        heads = None if heads is None else heads.to(device)
    fast = CalmModel(
        model, policy, classifier=classifier, heads=heads, capture=capture, compile=compile
    )
    return fast, tokenizer


def _model(folder: Path, device: str | None) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = kind.from_pretrained(
        folder, config=config, dtype="auto", local_files_only=True, use_safetensors=True
    ).eval()
    return model if device is None else model.to(device)


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
