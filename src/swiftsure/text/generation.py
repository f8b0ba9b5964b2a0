"""What a policy for generation was made for: a model with its parts, and options of `generate`."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from swiftsure.policy import Policy
from swiftsure.text.calm.meta import MetaClassifier
from swiftsure.text.exit_heads import ExitHeads
from swiftsure.torch.fingerprinting import fingerprint

__all__ = ["calm_fingerprint", "end_tokens", "refuse_other_model", "refuse_other_options"]

HANDED_OVER = {
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "pad_token_id",
    "return_dict_in_generate",
    "use_cache",
}
"""Options that say how answers are handed over, and not what they are."""

SHAPING = {
    "assistant_model",
    "custom_generate",
    "generation_config",
    "logits_processor",
    "prefix_allowed_tokens_fn",
    "stopping_criteria",
}
"""Arguments of `generate` besides its options that change answers."""

NEUTRAL = {"do_sample": False, "num_return_sequences": 1, "repetition_penalty": 1.0}
"""What some options mean where a model's generation_config does not say them."""


def calm_fingerprint(
    model: nn.Module, classifier: MetaClassifier | None = None, heads: ExitHeads | None = None
) -> str:
    """Return the fingerprint of a model with its meta-classifier and exit heads, if any."""
    parts = {"classifier": classifier, "heads": heads}
    there = {name: part for name, part in parts.items() if part is not None}
    return fingerprint(nn.ModuleDict({"model": model, **there}) if there else model)


def refuse_other_model(
    policy: Policy,
    model: nn.Module,
    classifier: MetaClassifier | None,
    heads: ExitHeads | None = None,
) -> None:
    """Raise if a policy was made for another model."""
    expected = policy.certificate.model
    if expected is None:  # made from arrays alone
        return
    found = calm_fingerprint(model, classifier, heads)
    if found != expected:
        raise ValueError(
            "`policy` was made for another model (or other weights): its fingerprint is"
            f" {expected[:19]}…, but this model's is {found[:19]}…. Calibrate anew."
        )


def refuse_other_options(
    options: Mapping[str, Any], made_for: Mapping[str, Any], model: Any
) -> None:
    """Raise if options of `generate` would give other answers than those that were certified."""
    own = model.generation_config
    for name, value in options.items():
        if name in HANDED_OVER or not (name in made_for or name in SHAPING or hasattr(own, name)):
            continue
        usual = getattr(own, name, None)
        expected = made_for.get(name, NEUTRAL.get(name) if usual is None else usual)
        same = value == expected
        if name == "eos_token_id":
            same = set(end_tokens(model, value)) == set(end_tokens(model, expected))
        if not same:
            raise ValueError(f"`policy` was made for {name}={expected!r}, but got {value!r}.")


def end_tokens(model: Any, given: int | Sequence[int] | str | None) -> list[int]:
    """Return the tokens that end an answer; "model": the model's own."""
    ends: Any = model.generation_config.eos_token_id if given == "model" else given
    if ends is None:
        return []
    return [ends] if isinstance(ends, int) else list(ends)
