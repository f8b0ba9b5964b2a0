"""`sweep_pair`: run two models on texts at every level of a draft rule and record the results."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib import checks
from swiftsure.losses import Loss
from swiftsure.records import ThresholdRecord
from swiftsure.run import RunBatch, RunOptions, Runs, sweep_grid
from swiftsure.text.bild.model import BigLittle
from swiftsure.text.bild.pair import pair_fingerprint
from swiftsure.text.bild.rules import DraftRule
from swiftsure.text.exit_heads import HeadedNorm
from swiftsure.text.inputs import Texts, refuse_seen
from swiftsure.text.text_sweep import TextSweep

__all__ = ["sweep_pair"]

Array = NDArray[Any]


def sweep_pair(
    pair: BigLittle,
    texts: Texts,
    *,
    thresholds: Sequence[float],
    losses: Sequence[str | Loss] = ("bleu",),
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None = None,
    seed: int = 0,
    run: RunOptions = RunOptions(),
) -> ThresholdRecord:
    """Generate at every level of a draft rule and return a record of losses and costs.

    The first column, level 0, is the large model alone, with its costs. A rollback threshold below
    log 2 = 0.693 drafts without changing the output, for comparison. With `Speculative`, the first
    column is sampled at tolerance 0, which is the large model's distribution, with the random
    numbers of the other columns; its costs are still those of the large model alone.

    Parameters
    ----------
    pair : BigLittle
        The two models and a draft rule, whose level is ignored.
    texts : Texts
        None that the draft's head was fitted on.
    thresholds : (K,)
        Levels, rising; 0 is added in front if it is missing.
    max_new_tokens : int
        The policy will require the same.
    eos_token_id : int or ints, optional
        The model's by default; if given, the policy will require the same.
    seed : int
        For rules that sample.
    losses, run
        As in `sweep`.

    Returns
    -------
    record : ThresholdRecord
        With the costs "large_passes" and "small_passes" (per token) and "flops" of every text at
        every level, and the pair's fingerprint. Its dial is "rollback" (or "tolerance").

    Raises
    ------
    ValueError
        If a text is empty, too long or was used to fit the draft's head, a level is out of range,
        or the shards come from another run.
    """
    if not isinstance(pair, BigLittle):
        raise TypeError(
            f"`pair` must be a BigLittle(large, small, rule), but got {type(pair).__name__}."
        )
    generation: dict[str, Any] = {"max_new_tokens": checks.count("max_new_tokens", max_new_tokens)}
    if eos_token_id is not None:
        generation["eos_token_id"] = eos_token_id
    for part in pair.small.modules():
        if isinstance(part, HeadedNorm):
            refuse_seen(texts, "draft's head", part.trained_on)
    levels = checks.numbers("thresholds", list(thresholds), np.float64)
    for level in levels.ravel().tolist():
        pair.rule.check_level(level)
    return _PairSweep(
        system=DraftRule.system,
        grid=sweep_grid(levels, 0.0),
        dial=pair.rule.dial,
        fingerprint=pair_fingerprint(pair.large, pair.small),
        settings=pair.rule.settings() | {"generation": generation},
        model=pair.large,
        texts=texts,
        losses=losses,
        generation=generation,
        seed=seed,
        chunk_size=1,  # readers remember the runs of one text only
        pair=pair,
    ).run(len(texts), run)


@dataclass(kw_only=True)
class _PairSweep(TextSweep):
    """Sweep over texts one by one; prefixes that runs of a text share are computed once."""

    pair: BigLittle

    def prepare(self, inputs: slice) -> RunBatch:
        """Encode a text."""
        rule = self.pair.rule
        passage = self.pair.passage(
            self.texts.encoded(inputs, self.model)["input_ids"],
            **self.generation,
            seed=self.seed,
            sequence=inputs.start,
            remember=True,
        )

        def run(_rows: NDArray[np.int64], columns: NDArray[np.int64]) -> Runs:
            column = int(columns[0])
            # When sampling, the large model runs at tolerance 0: with other random numbers its
            # answer would differ, and be no better for comparison.
            alone = column == 0 and not rule.samples
            found = passage.run(rule.at(None if alone else float(self.grid[column])))
            costs = {
                "large_passes": found.large_passes / len(found.tokens),
                "small_passes": found.small_passes / len(found.tokens),
                "flops": found.flops,
                "alone_flops": found.alone_flops,
            }
            same = (found.same_from <= self.grid) & (self.grid < found.same_below) & (not alone)
            values = {name: np.asarray([cost]) for name, cost in costs.items()}
            return Runs({"answers": self.decoded([list(found.tokens)]), **values}, same[None])

        return run

    def columns(self, inputs: slice, tables: dict[str, Array]) -> dict[str, Any]:
        """Return the columns of some texts' record; the first has the large model's costs."""
        tables["large_passes"][:, 0], tables["small_passes"][:, 0] = 1.0, 0.0
        tables["flops"][:, 0] = tables.pop("alone_flops")[:, 0]
        return super().columns(inputs, tables)
