"""`sweep`: run a model on texts at every threshold and record losses and costs."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure import checks
from swiftsure.losses import LOSSES, Loss
from swiftsure.records import ThresholdRecord
from swiftsure.systems import RunBatch, Runs, sweep_grid, threshold_levels
from swiftsure.text.calm.meta import MetaClassifier
from swiftsure.text.calm.model import CalmModel, calm_fingerprint
from swiftsure.text.calm.results import Depths
from swiftsure.text.calm.rules import ExitRule
from swiftsure.text.exit_heads import ExitHeads
from swiftsure.text.inputs import Source, encode, refuse_seen, token_rows
from swiftsure.text.text_sweep import TextData, TextSweep

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
    """Generate at every threshold and return a record of losses and costs.

    Parameters
    ----------
    model : PreTrainedModel
        From a known family, in evaluation mode.
    texts : (n,)
        Not empty; texts that are too long are refused unless `max_source_length` cuts them.
    references : (n,), optional
        One or several per text, for the gap risk; without them only consistency is recorded.
    tokenizer : the model's tokenizer
    thresholds : (K,)
        Safest first; the full model is added in front if it is missing.
    losses : names among "rouge_l", "token_f1", "bleu", or text `Loss` objects
    rule : ExitRule, optional
        Score, decay and so on; its threshold is ignored.
    score : str, optional
        Short for a rule with only this score.
    classifier : MetaClassifier
        For score "meta"; not trained on any of these texts.
    heads : ExitHeads, optional
        For a model that was not trained to exit early; not fitted on any of these texts.
    generation : mapping
        Options for `generate`, such as max_new_tokens; the policy will require the same.
    seed : int
        For sampling, with `do_sample=True` in `generation`.
    ids, groups : (n,), optional
    shards : folder, optional
        Where to write the record in pieces of `shard_size` texts, and to resume from.
    progress : bool, optional
        Show a progress bar; by default only if standard error is a terminal.

    Returns
    -------
    record : ThresholdRecord
        With the costs "layers" (mean decoder blocks per token) and "flops" (of decoding) of every
        text at every threshold, and the model's fingerprint.

    Raises
    ------
    ValueError
        If a text is empty or too long, the classifier or the heads were trained on one of them, or
        the shards come from another run.
    """
    chosen = rule if rule is not None else ExitRule(None, score=score or "softmax")
    if score is not None and score != chosen.score:
        raise ValueError(f"`rule` has score {chosen.score!r}, but got {score!r}.")
    for name, trained in (("classifier", classifier), ("heads", heads)):
        if trained is not None:
            refuse_seen(texts, name, trained.trained_on)
    data = TextData.of(texts, references, ids, groups)
    rows = token_rows(data.texts, tokenizer, model, max_source_length)  # refuses bad texts early
    return _CalmSweep(
        fast=CalmModel(model, replace(chosen, threshold=None), classifier=classifier, heads=heads),
        data=data,
        tokenizer=tokenizer,
        grid=sweep_grid(threshold_levels("thresholds", list(thresholds)), np.inf),
        losses=[LOSSES.choose(loss, "losses") for loss in losses],
        max_source_length=max_source_length,
        generation=dict(generation or {}),
        seed=seed,
        batch_size=checks.count("batch_size", batch_size),
        fingerprint=calm_fingerprint(model, classifier, heads),
        lengths=np.asarray([len(row) for row in rows]),
    ).run(len(texts), shards=shards, shard_size=shard_size, progress=progress)


def same_generation(rule: ExitRule, ran_at: ArrayLike, depths: Depths, grid: Array) -> Array:
    """Return a mask of the thresholds at which each sequence would come out the same, (n, K).

    A token that did not exit stays at every higher threshold; one that exited still exits at every
    lower one. `rule` is the run's rule, `ran_at` its threshold for each sequence, (n,).
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
    # An unreachable threshold computes no confidences, so nothing is known of other thresholds.
    compared: Array = np.all(looked | ~running, axis=1, keepdims=True)
    itself: Array = grid == np.reshape(np.asarray(ran_at, np.float32), (n, 1))
    return (same & compared) | itself


@dataclass(frozen=True)
class _CalmSweep(TextSweep):
    """Sweep with early exits; every sequence of a batch has its own threshold."""

    fast: CalmModel
    lengths: NDArray[np.int64]
    batch_size: int = 8

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that policies of this record are bound to, besides the model."""
        found = self.fast.rule.settings(self.fast.n_exits)
        return found | ({"generation": self.generation} if self.generation else {})

    def order(self, inputs: slice) -> NDArray[np.int64]:
        """Return the order of texts by length: answers to similarly long texts end together."""
        return self.lengths[inputs].argsort(kind="stable")

    def prepare(self, inputs: slice) -> RunBatch:
        """Encode the texts; an encoder runs once on each."""
        texts = self.data.texts[inputs]
        encoded = encode(texts, self.tokenizer, self.fast.model, self.max_source_length)
        source = Source(self.fast.model, encoded, self.batch_size)

        def run(rows: NDArray[np.int64], columns: NDArray[np.int64]) -> Runs:
            given = source.rows(rows.tolist())
            output = self.fast.generate(
                **given,
                **self.generation,
                thresholds=self.grid[columns].tolist(),
                seed=self.seed,
                sequence_ids=(inputs.start + rows).tolist(),
            )
            tokens, depths = output.sequences, output.depths
            if "input_ids" in given:  # a causal model repeats its prompt
                tokens = tokens[:, given["input_ids"].shape[1] :]
            values = {
                "answers": self.decoded(tokens),
                "layers": depths.mean_layers,
                "flops": depths.flops,
            }
            return Runs(
                values, same_generation(self.fast.rule, self.grid[columns], depths, self.grid)
            )

        return run
