"""`sweep_pair`: from two models and texts to a record over the levels of a drafting rule.

A run at one level tells for which others it would be the same: those that lie on the same side of
every distance that was compared. Only levels that no run so far covers are run. Of those runs too,
models run but once on what they have in common: encoders on each text, decoders on each beginning.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure import checks
from swiftsure.losses import Loss
from swiftsure.records import ThresholdRecord
from swiftsure.records.shards import Shards
from swiftsure.text.bild.model import BigLittle
from swiftsure.text.bild.pair import pair_fingerprint
from swiftsure.text.bild.results import BildRun
from swiftsure.text.bild.rules import DraftRule, Rollback
from swiftsure.text.exit_heads import HeadedNorm
from swiftsure.text.inputs import encode, refuse_seen, token_rows
from swiftsure.text.samples import SweptTexts, resolved_loss

__all__ = ["sweep_pair"]

Array = NDArray[Any]

COSTS = ("large_passes", "small_passes", "flops")


def sweep_pair(
    large: Any,
    small: Any,
    texts: Sequence[str],
    references: Sequence[str | Sequence[str]] | None = None,
    *,
    tokenizer: Any,
    small_tokenizer: Any = None,
    thresholds: Sequence[float],
    rule: DraftRule | None = None,
    losses: Sequence[str | Loss] = ("bleu",),
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None = None,
    max_source_length: int | None = None,
    seed: int = 0,
    ids: ArrayLike | None = None,
    groups: ArrayLike | None = None,
    shards: str | os.PathLike[str] | None = None,
    shard_size: int = 64,
    progress: bool | None = None,
) -> ThresholdRecord:
    """Generate at every level of a rule's dial, and record losses and costs.

    The first column, level 0, is the large model alone, with its costs. Drafts that change nothing,
    to be compared with it, are those of a rollback threshold below log 2 = 0.693. Where tokens are
    drawn, the first column's are drawn with tolerance 0, that is from the large model, with the
    random numbers of the other columns; its costs are the large model's.

    Parameters
    ----------
    large, small : PreTrainedModel
        As in `BigLittle`.
    texts : (n,)
        Not empty; too long ones are refused unless `max_source_length` says where to cut.
    references : (n,), optional
        One text or several each, for the gap risk; without them only consistency is recorded.
    tokenizer : of both models
    small_tokenizer : optional
        The small model's, to be compared.
    thresholds : (K,)
        Levels of the dial, rising; 0 is put before them where it is not.
    rule : DraftRule, optional
        `Rollback` with fallback threshold 0.5, or another; its level is of no account.
    losses : names among "bleu", "rouge_l", "token_f1", or `Loss`es of texts
    max_new_tokens : int
        The policy will insist on it.
    eos_token_id : int or ints, optional
        The model's by default; the policy will insist on others.
    seed : int
        Of rules that draw tokens.
    ids, groups : (n,), optional
    shards : folder, optional
        Where to write the record in pieces of `shard_size` texts, and to resume from.
    progress : bool, optional
        Show a progress bar; by default where standard error is a terminal.

    Returns
    -------
    record : ThresholdRecord
        With costs "large_passes" and "small_passes" (per token) and "flops" of every text at every
        level, and the pair's fingerprint. Its dial is "rollback" (or "tolerance").

    Raises
    ------
    ValueError
        If the models do not fit together, a text is empty, too long or one that the draft's head
        was fitted on, a level is out of range, or the shards come from another run.
    """
    chosen = rule if rule is not None else Rollback(None)
    tokenizers = None if small_tokenizer is None else (tokenizer, small_tokenizer)
    generation: dict[str, Any] = {"max_new_tokens": checks.count("max_new_tokens", max_new_tokens)}
    if eos_token_id is not None:
        generation["eos_token_id"] = eos_token_id
    run = _PairSweep(
        pair=BigLittle(large, small, chosen, tokenizers=tokenizers),
        tokenizer=tokenizer,
        grid=_grid(thresholds, chosen),
        losses=[resolved_loss(loss) for loss in losses],
        max_source_length=max_source_length,
        generation=generation,
        seed=seed,
        fingerprint=pair_fingerprint(large, small),
    )
    for part in small.modules():
        if isinstance(part, HeadedNorm):
            refuse_seen(texts, "draft's head", part.trained_on)
    data = SweptTexts.of(texts, references, ids, groups)
    token_rows(data.texts, tokenizer, large, max_source_length)  # none is to be refused later
    kept = Shards(shards, run.identity(data, shard_size))
    return kept.record(len(texts), shard_size, partial(run.record, data), progress)


@dataclass(frozen=True)
class _PairSweep:
    """One pair, one rule, one grid."""

    pair: BigLittle
    tokenizer: Any
    grid: NDArray[np.float64]
    losses: list[Loss]
    max_source_length: int | None
    generation: dict[str, Any]
    seed: int
    fingerprint: str

    def record(self, data: SweptTexts, rows: slice) -> ThresholdRecord:
        """Return the record of some texts."""
        texts = data.texts[rows]
        answers = np.full((len(texts), len(self.grid)), None, dtype=object)
        costs = {name: np.zeros(answers.shape) for name in COSTS}
        for place, text in enumerate(texts):
            runs = self._runs(text, rows.start + place)
            said = self.tokenizer.batch_decode(
                [list(run.tokens) for run in runs], skip_special_tokens=True
            )
            answers[place] = said
            for name, values in _costs(runs).items():
                costs[name][place] = values
        return data.record(
            rows,
            self.grid,
            answers,
            self.losses,
            costs=costs,
            fingerprint=self.fingerprint,
            dial=self.pair.rule.dial,
            settings=self.settings(),
        )

    def settings(self) -> dict[str, Any]:
        """Return what a policy of this record must insist on."""
        return self.pair.rule.settings() | {"generation": self.generation}

    def identity(self, data: SweptTexts, shard_size: int) -> dict[str, Any]:
        """Return what shards of one sweep have in common."""
        return {
            "model": self.fingerprint,
            "settings": self.settings(),
            "thresholds": self.grid.tolist(),
            "losses": [loss.name for loss in self.losses],
            "max_source_length": self.max_source_length,
            "seed": self.seed,
            "shard_size": shard_size,
            "data": data.hash(),
        }

    def _runs(self, text: str, sequence: int) -> list[BildRun]:
        """Return the run of a text at each level; those that are bound to be the same are one."""
        encoded = encode([text], self.tokenizer, self.pair.large.model, self.max_source_length)
        passage = self.pair.passage(
            encoded["input_ids"],
            **self.generation,
            seed=self.seed,
            sequence=sequence,
            remember=True,
        )
        rule = self.pair.rule
        # A draw of the large model by itself would be another one, and no better to compare with.
        runs = [passage.run(rule.at(0.0 if rule.samples else None))]
        last = runs[0] if rule.samples else None
        for level in self.grid[1:].tolist():
            if last is None or not last.same_from <= level < last.same_below:
                last = passage.run(rule.at(level))
            runs.append(last)
        return runs


def _costs(runs: Sequence[BildRun]) -> Mapping[str, list[float]]:
    """Return the costs of a text's runs, the first of which counts as the large model alone."""
    first, *others = runs
    return {
        "large_passes": [1.0, *(run.large_passes / len(run.tokens) for run in others)],
        "small_passes": [0.0, *(run.small_passes / len(run.tokens) for run in others)],
        "flops": [first.alone_flops, *(run.flops for run in others)],
    }


def _grid(thresholds: Sequence[float], rule: DraftRule) -> NDArray[np.float64]:
    levels: NDArray[np.float64] = checks.numbers("thresholds", list(thresholds), np.float64)
    if levels.ndim != 1 or len(levels) == 0:
        raise ValueError("`thresholds` must be a list of numbers, safest first.")
    for level in levels.tolist():
        rule.check_level(level)
    if levels[0] > 0:
        levels = np.concatenate([[0.0], levels])
    if (np.diff(levels) <= 0).any():
        raise ValueError("`thresholds` must rise from the safest, 0, to the fastest, each once.")
    return levels
