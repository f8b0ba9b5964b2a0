"""Training on the full model's own answers: exit heads, and the meta-classifier."""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from swiftsure import checks
from swiftsure.progress import steps
from swiftsure.text.calm.meta import MetaClassifier
from swiftsure.text.calm.model import CalmModel, with_heads
from swiftsure.text.exit_heads import ExitHeads, solve_exit_heads
from swiftsure.text.families import Family, family_of
from swiftsure.text.inputs import Source, encode, input_hashes
from swiftsure.torch.modes import refuse_training

__all__ = ["agreement_examples", "fit_exit_heads", "train_meta"]


def train_meta(
    model: Any,
    texts: Sequence[str],
    tokenizer: Any,
    *,
    heads: ExitHeads | None = None,
    max_new_tokens: int = 64,
    max_source_length: int | None = None,
    batch_size: int = 8,
    epochs: int = 20,
    learning_rate: float = 3e-3,
    held_out: float = 0.1,
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
    heads : ExitHeads, optional
        Through which tokens will leave.
    epochs : int
        The most; the classifier of the epoch that was best on texts held out is kept.
    held_out : float
        Share of the texts that is held out, in [0, 1): none of fewer than 1 / held_out. Without
        any, the last epoch's is kept, which may be surer than it should be.

    Returns
    -------
    classifier : MetaClassifier
        In evaluation mode, on the model's device.
    """
    checks.count("epochs", epochs)
    refuse_training(model)
    family = family_of(model)
    share = checks.between("held_out", held_out, 0.0, 1.0) if held_out else 0.0
    n_held = int(share * len(texts))
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(texts), generator=generator).tolist()

    def examples(chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        return agreement_examples(
            model,
            [texts[k] for k in chosen],
            tokenizer,
            heads=heads,
            max_new_tokens=max_new_tokens,
            max_source_length=max_source_length,
            batch_size=batch_size,
        )

    inputs, labels = examples(order[n_held:])
    held = examples(order[:n_held]) if n_held else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        classifier = MetaClassifier(inputs.shape[1], trained_on=input_hashes(texts))
    classifier = classifier.to(family.head.weight.device)
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=learning_rate)
    best, kept = math.inf, classifier.state_dict()  # which follows the training, until it is copied
    with steps("training", epochs, progress) as advance, torch.enable_grad():
        for _ in range(epochs):
            for index in torch.split(torch.randperm(len(inputs), generator=generator), 256):
                here = index.to(inputs.device)
                loss = cross_entropy(classifier(inputs[here]), labels[here])
                optimizer.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            if held is not None:
                with torch.no_grad():
                    missed = float(cross_entropy(classifier(held[0]), held[1]))
                if missed < best:
                    best, kept = missed, copy.deepcopy(classifier.state_dict())
            advance()
    classifier.load_state_dict(kept)
    return classifier.to(family.head.weight.dtype).eval()


def fit_exit_heads(
    model: Any,
    texts: Sequence[str],
    tokenizer: Any,
    *,
    exits: Sequence[int] | None = None,
    ridge: float = 1e-3,
    max_new_tokens: int = 64,
    max_source_length: int | None = None,
    batch_size: int = 8,
) -> ExitHeads:
    """Fit heads that let a model leave early which was never trained to.

    The model generates in full; each head is the linear map of least squared error from the states
    after its block to those after the last, on all answered tokens.

    Parameters
    ----------
    model : PreTrainedModel
        Of a known family, in evaluation mode; it is left as it is.
    texts : texts
        Other ones than will calibrate: `sweep` refuses a text that the heads were fitted on.
    exits : ints, optional
        Blocks to give a head, 0-based; all but the last by default.
    ridge : float
        Penalty on large weights, as a share of the states' mean square.

    Returns
    -------
    heads : ExitHeads
        In evaluation mode, with the model's device and dtype.
    """
    refuse_training(model)
    family = family_of(model)
    chosen = range(len(family.blocks) - 1) if exits is None else exits
    answers = _answer_states(model, texts, tokenizer, max_new_tokens, max_source_length, batch_size)
    heads = solve_exit_heads(answers, chosen, ridge=ridge, trained_on=input_hashes(texts))
    return heads.to(family.head.weight)


@torch.no_grad()
def agreement_examples(
    model: Any,
    texts: Sequence[str],
    tokenizer: Any,
    *,
    heads: ExitHeads | None = None,
    max_new_tokens: int = 64,
    max_source_length: int | None = None,
    batch_size: int = 8,
) -> tuple[Tensor, Tensor]:
    """Return normed states of all tokens at all exits, and whether they agree.

    Returns
    -------
    states : (examples, width), in float32
    labels : (examples,)
        1 where the block's most probable token is the full model's.
    """
    family = with_heads(family_of(model), heads)
    exits = range(len(family.blocks) - 1) if heads is None else heads.exits
    states, labels = [], []
    for outputs in _answer_states(
        model, texts, tokenizer, max_new_tokens, max_source_length, batch_size
    ):
        full = family.head(family.head_input(outputs[-1])).argmax(dim=1)
        for k in exits:
            token = family.head(family.exit_input(k, outputs[k])).argmax(dim=1)
            states.append(family.norm(outputs[k]).float())
            labels.append((token == full).long())
    if not states:
        raise ValueError("`texts` must not be empty.")
    return torch.cat(states), torch.cat(labels)


@torch.no_grad()
def _answer_states(
    model: Any,
    texts: Sequence[str],
    tokenizer: Any,
    max_new_tokens: int,
    max_source_length: int | None,
    batch_size: int,
) -> Iterator[list[Tensor]]:
    """Generate in full, and yield the states of answered tokens after every block."""
    family = family_of(model)
    for start in range(0, len(texts), checks.count("batch_size", batch_size)):
        part = encode(texts[start : start + batch_size], tokenizer, model, max_source_length)
        given = Source(model, part, batch_size).rows(range(len(part["input_ids"])))
        full = CalmModel(model, None).generate(
            **given, max_new_tokens=max_new_tokens, do_sample=False, num_beams=1
        )
        yield _fed_back(family, given, full.sequences)


def _fed_back(family: Family, given: dict[str, Any], sequences: Tensor) -> list[Tensor]:
    """Feed answers back at once, and return the states that gave their tokens, block by block."""
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
    return [states[:, prompt - 1 :][counted] for states in outputs]


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
