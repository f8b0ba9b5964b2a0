"""Training of the meta-classifier, on states of every block, against the full model's tokens."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from swiftsure import checks
from swiftsure.progress import steps
from swiftsure.text.calm import CalmModel
from swiftsure.text.families import Family, family_of
from swiftsure.text.inputs import Source, encode, input_hashes
from swiftsure.text.meta import MetaClassifier
from swiftsure.torch.modes import refuse_training

__all__ = ["agreement_examples", "train_meta"]


def train_meta(
    model: Any,
    texts: Sequence[str],
    tokenizer: Any,
    *,
    max_new_tokens: int = 64,
    max_source_length: int | None = None,
    batch_size: int = 8,
    epochs: int = 20,
    learning_rate: float = 3e-3,
    seed: int = 0,
    progress: bool | None = None,
) -> MetaClassifier:
    """Train a classifier to tell, from a block's state, whether its token is the full model's.

    The model generates in full, and its own answers are the only labels needed. AdamW on the
    cross-entropy of all tokens at all blocks but the last.

    Parameters
    ----------
    model : PreTrainedModel
        Of a known family, in evaluation mode; it is left as it is.
    texts : texts
        Other ones than will calibrate: `sweep` refuses a text that the classifier was trained on.
    tokenizer : of the model

    Returns
    -------
    classifier : MetaClassifier
        In evaluation mode, on the model's device.
    """
    checks.count("epochs", epochs)
    refuse_training(model)
    family = family_of(model)
    inputs, labels = agreement_examples(
        model,
        texts,
        tokenizer,
        max_new_tokens=max_new_tokens,
        max_source_length=max_source_length,
        batch_size=batch_size,
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        classifier = MetaClassifier(inputs.shape[1], trained_on=input_hashes(texts))
    classifier = classifier.to(family.head.weight.device)
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=learning_rate)
    with steps("training", epochs, progress) as advance, torch.enable_grad():
        for _ in range(epochs):
            for index in torch.split(torch.randperm(len(inputs), generator=generator), 256):
                here = index.to(inputs.device)
                loss = cross_entropy(classifier(inputs[here]), labels[here])
                optimizer.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            advance()
    return classifier.to(family.head.weight.dtype).eval()


@torch.no_grad()
def agreement_examples(
    model: Any,
    texts: Sequence[str],
    tokenizer: Any,
    *,
    max_new_tokens: int = 64,
    max_source_length: int | None = None,
    batch_size: int = 8,
) -> tuple[Tensor, Tensor]:
    """Return normed states of all tokens at all blocks but the last, and whether they agree.

    Returns
    -------
    states : (examples, width), in float32
    labels : (examples,)
        1 where the block's most probable token is the full model's.
    """
    family = family_of(model)
    states, labels = [], []
    for start in range(0, len(texts), checks.count("batch_size", batch_size)):
        part = encode(texts[start : start + batch_size], tokenizer, model, max_source_length)
        source = Source(model, part, batch_size)
        given = source.rows(range(len(part["input_ids"])))
        full = CalmModel(model, None).generate(
            **given, max_new_tokens=max_new_tokens, do_sample=False, num_beams=1
        )
        for x, y in _agreements(family, given, full.sequences):
            states.append(x.float())
            labels.append(y)
    if not states:
        raise ValueError("`texts` must not be empty.")
    return torch.cat(states), torch.cat(labels)


def _agreements(
    family: Family, given: dict[str, Any], sequences: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Feed the answers back at once, and compare each block's tokens with the last one's."""
    model = family.model
    prompt = 1 if "encoder_outputs" in given else given["input_ids"].shape[1]
    with _recorded(family) as outputs:
        if "encoder_outputs" in given:
            model(**given, decoder_input_ids=sequences[:, :-1], use_cache=False)
        else:
            mask = given["attention_mask"]
            more = mask.new_ones((len(mask), sequences.shape[1] - mask.shape[1]))
            whole = torch.cat([mask, more], dim=1)[:, :-1]
            model(sequences[:, :-1], attention_mask=whole, use_cache=False)
    # States at a position give the token after it; those after a sequence's end give none.
    counted = _before_end(sequences[:, prompt:], model.generation_config.eos_token_id)
    kept = [family.head_input(states[:, prompt - 1 :][counted]) for states in outputs]
    tokens = [family.head(each).argmax(dim=1) for each in kept]
    for states, token in zip(outputs[:-1], tokens[:-1], strict=True):
        normed = family.norm(states[:, prompt - 1 :][counted])
        yield normed, (token == tokens[-1]).long()


def _before_end(tokens: Tensor, end: int | list[int] | None) -> Tensor:
    """Return which tokens belong to their sequences, the end token included."""
    if end is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    ended = torch.isin(tokens, torch.as_tensor(end, device=tokens.device)).long()
    return ended.cumsum(dim=1) - ended == 0


@contextmanager
def _recorded(family: Family) -> Iterator[list[Tensor]]:
    """Collect what every block gives."""
    outputs: list[Tensor] = []

    def note(_module: Any, _inputs: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    with ExitStack() as undo:
        for block in family.blocks:
            undo.callback(block.register_forward_hook(note).remove)
        yield outputs
