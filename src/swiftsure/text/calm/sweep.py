"""`sweep`: from a model and texts to a threshold record, with far fewer runs than thresholds.

A generation at one threshold tells for which others it would be the same: those that lie on the
same side of every confidence that was compared. Only thresholds that none so far covers are run.
Every sequence of a batch has its own threshold, so batches stay full; an encoder runs once on each
text.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure import checks
from swiftsure.losses import Loss
from swiftsure.records import ThresholdRecord
from swiftsure.records.shards import Shards
from swiftsure.text.calm.meta import MetaClassifier
from swiftsure.text.calm.model import CalmModel
from swiftsure.text.calm.results import Depths
from swiftsure.text.calm.rules import ExitRule, checked_thresholds
from swiftsure.text.exit_heads import ExitHeads
from swiftsure.text.generation import calm_fingerprint
from swiftsure.text.inputs import Source, encode, refuse_seen, token_rows
from swiftsure.text.samples import SweptTexts, resolved_loss

__all__ = ["same_generation", "sweep"]

Array = NDArray[Any]


def sweep(
    model: Any,
    texts: Sequence[str],
    references: Sequence[str | Sequence[str]] | None = None,
    *,
    tokenizer: Any,
    thresholds: Sequence[float | None],
    losses: Sequence[str | Loss] = ("rouge_l",),
    rule: ExitRule | None = None,
    score: str | None = None,
    classifier: MetaClassifier | None = None,
    heads: ExitHeads | None = None,
    max_source_length: int | None = None,
    generation: Mapping[str, Any] | None = None,
    seed: int = 0,
    ids: ArrayLike | None = None,
    groups: ArrayLike | None = None,
    batch_size: int = 8,
    shards: str | os.PathLike[str] | None = None,
    shard_size: int = 64,
    progress: bool | None = None,
) -> ThresholdRecord:
    """Generate at every threshold, and record losses and costs.

    Parameters
    ----------
    model : PreTrainedModel
        Of a known family, in evaluation mode.
    texts : (n,)
        Not empty; too long ones are refused unless `max_source_length` says where to cut.
    references : (n,), optional
        One text or several each, for the gap risk; without them only consistency is recorded.
    tokenizer : of the model
    thresholds : (K,)
        Safest first; the full model is put before them where it is not.
    losses : names among "rouge_l", "token_f1", "bleu", or `Loss`es of texts
    rule : ExitRule, optional
        Score, decay and so on; its threshold is of no account.
    score : str, optional
        In place of a rule that says nothing else.
    classifier : MetaClassifier
        For score "meta"; trained on none of these texts.
    heads : ExitHeads, optional
        For a model that was not trained to leave early; fitted on none of these texts.
    generation : mapping
        For `generate`: max_new_tokens and the like; the policy will insist on it.
    seed : int
        Of sampling, with `do_sample=True` in `generation`.
    ids, groups : (n,), optional
    shards : folder, optional
        Where to write the record in pieces of `shard_size` texts, and to resume from.
    progress : bool, optional
        Show a progress bar; by default where standard error is a terminal.

    Returns
    -------
    record : ThresholdRecord
        With costs "layers" (mean decoder blocks per token) and "flops" (of decoding) of every text
        at every threshold, and the model's fingerprint.

    Raises
    ------
    ValueError
        If a text is empty or too long, the classifier was trained on one, or the shards come from
        another run.
    """
    chosen = rule if rule is not None else ExitRule(None, score=score or "softmax")
    if score is not None and score != chosen.score:
        raise ValueError(f"`rule` has score {chosen.score!r}, but got {score!r}.")
    for name, trained in (("classifier", classifier), ("heads", heads)):
        if trained is not None:
            refuse_seen(texts, name, trained.trained_on)
    fast = CalmModel(model, replace(chosen, threshold=None), classifier=classifier, heads=heads)
    run = _Sweep(
        fast=fast,
        tokenizer=tokenizer,
        grid=_grid(thresholds),
        losses=[resolved_loss(loss) for loss in losses],
        max_source_length=max_source_length,
        generation=dict(generation or {}),
        seed=seed,
        batch_size=checks.count("batch_size", batch_size),
        fingerprint=calm_fingerprint(model, classifier, heads),
    )
    data = SweptTexts.of(texts, references, ids, groups)
    token_rows(data.texts, tokenizer, model, max_source_length)  # none is to be refused later
    kept = Shards(shards, run.identity(data, shard_size))
    return kept.record(len(texts), shard_size, partial(run.record, data), progress)


def same_generation(rule: ExitRule, ran_at: ArrayLike, depths: Depths, grid: Array) -> Array:
    """Return at which thresholds each sequence would have come out the same, (n, K).

    A token that stayed at some confidence stays at every higher level; one that left, leaves at
    every lower one. `rule` is that of the run, `ran_at` its threshold for each sequence, (n,).
    """
    layers, looks = depths.exit_layers, depths.confidences
    n, tokens, n_looks = looks.shape
    exits = np.arange(n_looks)
    left_here = exits == layers[:, :, None] - 1
    stayed = np.where(left_here, -np.inf, np.nan_to_num(looks, nan=-np.inf)).max(axis=2)
    left = np.where(left_here, looks, np.inf).min(axis=2)
    levels = np.stack([rule.levels(grid, step) for step in range(tokens)])  # (tokens, K)
    own = np.stack([rule.levels(np.asarray(ran_at, np.float32), t) for t in range(tokens)]).T
    if rule.strict:
        fits = (levels >= stayed[:, :, None]) & (levels < left[:, :, None])
        looked = own < 1
    else:
        fits = (levels > stayed[:, :, None]) & (levels <= left[:, :, None])
        looked = own <= 1
    running = layers > 0
    same: Array = (fits | ~running[:, :, None]).all(axis=1)
    # Where a level was out of reach nobody looked, so nothing is known of other thresholds.
    known: Array = np.all(looked | ~running, axis=1, keepdims=True)
    itself: Array = grid == np.reshape(np.asarray(ran_at, np.float32), (n, 1))
    return (same & known) | itself


@dataclass(frozen=True)
class _Sweep:
    """One model, one rule, one grid."""

    fast: CalmModel
    tokenizer: Any
    grid: NDArray[np.float32]
    losses: list[Loss]
    max_source_length: int | None
    generation: dict[str, Any]
    seed: int
    batch_size: int
    fingerprint: str

    def record(self, data: SweptTexts, rows: slice) -> ThresholdRecord:
        """Return the record of some texts."""
        texts = data.texts[rows]
        answers, layers, flops = self._generate(texts, rows.start)
        return data.record(
            rows,
            self.grid.astype(np.float64),
            answers,
            self.losses,
            costs={"layers": layers, "flops": flops},
            fingerprint=self.fingerprint,
            settings=self.settings(),
        )

    def settings(self) -> dict[str, Any]:
        """Return what a policy of this record must insist on."""
        found = self.fast.rule.settings(self.fast.n_exits)
        return found | ({"generation": self.generation} if self.generation else {})

    def identity(self, data: SweptTexts, shard_size: int) -> dict[str, Any]:
        """Return what shards of one sweep have in common."""
        return {
            "model": self.fingerprint,
            "settings": self.settings(),
            "thresholds": [None if np.isinf(each) else float(each) for each in self.grid],
            "losses": [loss.name for loss in self.losses],
            "max_source_length": self.max_source_length,
            "seed": self.seed,
            "shard_size": shard_size,
            "data": data.hash(),
        }

    def _generate(self, texts: list[str], first: int) -> tuple[Array, Array, Array]:
        """Return answers, mean layers and FLOPs of each text at each threshold."""
        encoded = encode(texts, self.tokenizer, self.fast.model, self.max_source_length)
        source = Source(self.fast.model, encoded, self.batch_size)
        shape = (len(texts), len(self.grid))
        answers = np.full(shape, None, dtype=object)
        layers, flops = np.zeros(shape), np.zeros(shape)
        due = np.ones(shape, dtype=bool)
        # Texts of like length have answers of like length, and end together.
        by_length = np.argsort(encoded["attention_mask"].sum(dim=1).numpy(), kind="stable")
        while due.any():
            # The full model by itself: beside others its tokens would be looked at for nothing.
            waiting: Array = np.any(due[:, :1] if due[:, 0].any() else due, axis=1)
            rows = by_length[waiting[by_length]][: self.batch_size]
            columns = due[rows].argmax(axis=1)  # the safest that is due
            said, depths = self._run(source, rows, columns, first)
            same = same_generation(self.fast.rule, self.grid[columns], depths, self.grid)
            for place, row in enumerate(rows):
                new = due[row] & same[place]
                answers[row, new] = said[place]
                layers[row, new] = depths.mean_layers[place]
                flops[row, new] = depths.flops[place]
                due[row] &= ~new
        return answers, layers, flops

    def _run(
        self, source: Source, rows: Array, columns: Array, first: int
    ) -> tuple[list[str], Depths]:
        given = source.rows(rows.tolist())
        output = self.fast.generate(
            **given,
            **self.generation,
            thresholds=self.grid[columns].tolist(),
            seed=self.seed,
            sequence_ids=(first + rows).tolist(),
        )
        tokens = output.sequences
        if "input_ids" in given:  # a causal model repeats its prompt
            tokens = tokens[:, given["input_ids"].shape[1] :]
        return self.tokenizer.batch_decode(tokens, skip_special_tokens=True), output.depths


def _grid(thresholds: Sequence[float | None]) -> NDArray[np.float32]:
    levels = checked_thresholds("thresholds", list(thresholds))
    if levels.ndim != 1 or len(levels) == 0:
        raise ValueError("`thresholds` must be a list of numbers, safest first.")
    if np.isfinite(levels[0]):
        levels = np.concatenate([np.asarray([np.inf], np.float32), levels])
    if (np.diff(levels) >= 0).any():
        raise ValueError("`thresholds` must fall from the safest to the fastest, each once.")
    return levels
