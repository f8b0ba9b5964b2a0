"""Training exit heads, meta-classifiers and token scores on the full model's own answers."""

import copy
import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from swiftsure._lib import checks
from swiftsure._lib.progress import steps
from swiftsure.scores import LearnedScore
from swiftsure.text.calm.meta import MetaClassifier
from swiftsure.text.calm.model import CalmModel, with_heads
from swiftsure.text.calm.token_score import TOKEN_FEATURES, TokenScore, token_features
from swiftsure.text.decoder import Decoder, decoder_of
from swiftsure.text.exit_heads import ExitHeads, solve_exit_heads
from swiftsure.text.inputs import Source, Texts, input_hashes
from swiftsure.torch.modes import refuse_training

__all__ = ["agreement_examples", "fit_exit_heads", "learn_token_score", "train_meta"]


def train_meta(
    model: Any,
    texts: Texts,
    *,
    heads: ExitHeads | None = None,
    max_new_tokens: int = 64,
    batch_size: int = 8,
    epochs: int = 20,
    learning_rate: float = 3e-3,
    held_out: float = 0.1,
    seed: int = 0,
    progress: bool | None = None,
) -> MetaClassifier:
    """Train a classifier that predicts whether a block already gives the full model's token.

    The model generates in full, and its own answers are the only labels needed. Training minimises
    the cross-entropy over all tokens at all blocks but the last, with AdamW.

    Parameters
    ----------
    model : PreTrainedModel
        From a known family, in evaluation mode; it is not changed.
    texts : Texts
        Not those used for calibration: `sweep` refuses texts that the classifier was trained on.
    heads : ExitHeads, optional
        The exit heads that will be used.
    epochs : int
        Maximum; the classifier of the best epoch on the held-out texts is kept.
    held_out : float
        Fraction of the texts to hold out, in [0, 1); none if there are fewer than 1 / held_out.
        Without held-out texts the last epoch is kept, which may be overconfident.

    Returns
    -------
    classifier : MetaClassifier
        In evaluation mode, on the model's device.
    """
    checks.count("epochs", epochs)
    refuse_training(model)
    share = checks.between("held_out", held_out, 0.0, 1.0) if held_out else 0.0
    n_held = int(share * len(texts))
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(texts), generator=generator).tolist()
    examples = partial(
        agreement_examples,
        model,
        heads=heads,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
    )
    inputs, labels = examples(texts.part(order[n_held:]))
    held = examples(texts.part(order[:n_held])) if n_held else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        classifier = MetaClassifier(inputs.shape[1], trained_on=input_hashes(texts.texts))
    head = decoder_of(model).head.weight
    classifier = classifier.to(head.device)
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=learning_rate)
    best, kept = math.inf, classifier.state_dict()  # a live view, until it is replaced by a copy
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
                    held_loss = float(cross_entropy(classifier(held[0]), held[1]))
                if held_loss < best:
                    best, kept = held_loss, copy.deepcopy(classifier.state_dict())
            advance()
    classifier.load_state_dict(kept)
    return classifier.to(head.dtype).eval()


@torch.no_grad()
def learn_token_score(
    model: Any,
    texts: Texts,
    *,
    heads: ExitHeads | None = None,
    max_new_tokens: int = 64,
    batch_size: int = 8,
) -> TokenScore:
    """Learn how likely each block gives the full model's token, without labels.

    The model generates in full. For each block from the second to the last but one, a logistic
    regression on `TOKEN_FEATURES` is fitted to whether its most probable token is the full model's,
    as in `LearnedScore`.

    Parameters
    ----------
    model, texts, heads
        As in `train_meta`: `sweep` refuses texts that the score was learned on.

    Returns
    -------
    score : TokenScore
        For `CalmModel(model, score="learned", classifier=score)`.
    """
    refuse_training(model)
    decoder = with_heads(decoder_of(model), heads)
    n_blocks = len(decoder.blocks)
    exits = [k for k in (range(n_blocks - 1) if heads is None else heads.exits) if k > 0]
    if not exits:
        raise ValueError("`model` must have 3 blocks or more, to learn from the second on.")
    values, agrees = [], []
    answers = _answer_states(model, texts, max_new_tokens=max_new_tokens, batch_size=batch_size)
    for outputs in answers:
        full = decoder.logits(decoder.head(decoder.head_input(outputs[-1]))).argmax(dim=1)
        here, same = [], []
        for k in exits:
            logits = decoder.logits(decoder.head(decoder.exit_input(k, outputs[k])))
            here.append(token_features(logits, outputs[k], outputs[k - 1]))
            same.append(logits.argmax(dim=1) == full)
        values.append(torch.stack(here, dim=1).double().cpu())
        agrees.append(torch.stack(same, dim=1).double().cpu())
    learned = LearnedScore.fit_features(
        torch.cat(values).numpy(), torch.cat(agrees).numpy(), TOKEN_FEATURES, rising=True
    )
    weights = np.zeros((n_blocks - 1, 1 + len(TOKEN_FEATURES)))
    weights[exits] = learned.weights
    found = TokenScore(weights, trained_on=input_hashes(texts.texts))
    return found.to(decoder.head.weight.device).eval()


def fit_exit_heads(
    model: Any,
    texts: Texts,
    *,
    exits: Sequence[int] | None = None,
    ridge: float = 1e-3,
    max_new_tokens: int = 64,
    batch_size: int = 8,
) -> ExitHeads:
    """Fit exit heads for a model that was not trained to exit early.

    The model generates in full. Each head is the least-squares linear map from the states after its
    block to those after the last block, over all generated tokens.

    Parameters
    ----------
    model, texts
        As in `train_meta`: `sweep` refuses texts that the heads were fitted on.
    exits : ints, optional
        Blocks that get a head, 0-based; all but the last by default.
    ridge : float
        Penalty on large weights, as a share of the states' mean square.

    Returns
    -------
    heads : ExitHeads
        In evaluation mode, with the model's device and dtype.
    """
    refuse_training(model)
    decoder = decoder_of(model)
    chosen = range(len(decoder.blocks) - 1) if exits is None else exits
    answers = _answer_states(
        model,
        texts,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
    )
    heads = solve_exit_heads(
        answers,
        chosen,
        ridge=ridge,
        normed=decoder.family.norm is not None,
        trained_on=input_hashes(texts.texts),
    )
    return heads.to(decoder.head.weight)


@torch.no_grad()
def agreement_examples(
    model: Any,
    texts: Texts,
    *,
    heads: ExitHeads | None = None,
    **generation: Any,
) -> tuple[Tensor, Tensor]:
    """Return the normed states of all tokens at all exits, and whether each agrees with the model.

    Returns
    -------
    states : (examples, width), in float32
    labels : (examples,)
        1 if the block's most probable token is also the full model's, otherwise 0.
    """
    decoder = with_heads(decoder_of(model), heads)
    exits = range(len(decoder.blocks) - 1) if heads is None else heads.exits
    states, labels = [], []
    for outputs in _answer_states(model, texts, **generation):
        full = decoder.logits(decoder.head(decoder.head_input(outputs[-1]))).argmax(dim=1)
        for k in exits:
            scores = decoder.head(decoder.exit_input(k, outputs[k]))
            token = decoder.logits(scores).argmax(dim=1)
            states.append(decoder.norm(outputs[k]).float())
            labels.append((token == full).long())
    return torch.cat(states), torch.cat(labels)


@torch.no_grad()
def _answer_states(
    model: Any,
    texts: Texts,
    *,
    max_new_tokens: int = 64,
    batch_size: int = 8,
) -> Iterator[list[Tensor]]:
    """Generate in full, and yield the states of generated tokens after every block."""
    full = CalmModel(model)
    for start in range(0, len(texts), checks.count("batch_size", batch_size)):
        part = texts.encoded(slice(start, start + batch_size), model)
        given = Source(model, part, batch_size).rows(range(len(part["input_ids"])))
        output = full.generate(**given, max_new_tokens=max_new_tokens, do_sample=False, num_beams=1)
        yield _replay_states(full.decoder, given, output.sequences)


def _replay_states(decoder: Decoder, given: dict[str, Any], sequences: Tensor) -> list[Tensor]:
    """Run the answers through the model in one pass; return their states after each block."""
    model = decoder.model
    prompt = 1 if "encoder_outputs" in given else given["input_ids"].shape[1]
    outputs: list[Tensor] = []

    def record(_module: Any, _inputs: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    with ExitStack() as undo:
        for block in decoder.blocks:
            undo.callback(block.register_forward_hook(record).remove)
        if "encoder_outputs" in given:
            model(**given, decoder_input_ids=sequences[:, :-1], use_cache=False)
        else:
            mask = given["attention_mask"]
            new = mask.new_ones((len(mask), sequences.shape[1] - mask.shape[1]))
            whole = torch.cat([mask, new], dim=1)[:, :-1]
            more = {}
            if "position_ids" in inspect.signature(model.forward).parameters:
                more["position_ids"] = (whole.cumsum(dim=1) - 1).clamp(min=0)  # as in `generate`
            model(sequences[:, :-1], attention_mask=whole, use_cache=False, **more)
    # The state at a position predicts the next token; positions after a sequence's end are dropped.
    counted = _before_end(sequences[:, prompt:], model.generation_config.eos_token_id)
    return [states[:, prompt - 1 :][counted] for states in outputs]


def _before_end(tokens: Tensor, end: int | list[int] | None) -> Tensor:
    """Return a mask of the tokens up to and including the end token."""
    if end is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    ended = torch.isin(tokens, torch.as_tensor(end, device=tokens.device)).long()
    return ended.cumsum(dim=1) - ended == 0
