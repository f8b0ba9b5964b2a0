"""`sweep`: run a model on texts at every threshold and record losses and costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure._lib import checks
from swiftsure.losses import Loss
from swiftsure.records import ThresholdRecord
from swiftsure.run import RunBatch, RunOptions, Runs, same_exits, sweep_grid, threshold_levels
from swiftsure.text.calm.model import CalmModel, calm_fingerprint
from swiftsure.text.calm.results import Depths
from swiftsure.text.calm.rules import CalmRule
from swiftsure.text.inputs import Source, Texts, refuse_seen
from swiftsure.text.text_sweep import TextSweep

__all__ = ["same_generation", "sweep"]

Array = NDArray[Any]


def sweep(
    model: CalmModel,
    texts: Texts,
    *,
    thresholds: Sequence[float | None],
    losses: Sequence[str | Loss] = ("rouge_l",),
    generation: Mapping[str, Any] | None = None,
    seed: int = 0,
    batch_size: int = 8,
    run: RunOptions = RunOptions(),
) -> ThresholdRecord:
    """Generate at every threshold and return a record of losses and costs.

    Parameters
    ----------
    model : CalmModel
        The model with its rule (score, decay and so on), classifier and exit heads; its threshold
        is ignored. Policies will require the same.
    texts : Texts
        None that the classifier was trained on, or the heads were fitted on.
    thresholds : (K,)
        Safest first; the full model is added in front if it is missing.
    losses : names among "rouge_l", "token_f1", "bleu", or text `Loss` objects
    generation : mapping
        Options for `generate`, such as max_new_tokens; the policy will require the same.
    seed : int
        For sampling, with `do_sample=True` in `generation`.
    run : RunOptions
        Shards, progress, and where the model runs; Ray actors take one shard at a time.

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
    if not isinstance(model, CalmModel):
        raise TypeError(
            "`model` must be a CalmModel, such as CalmModel(model, score='softmax'), but got"
            f" {type(model).__name__}."
        )
    for name, trained in (("classifier", model.classifier), ("heads", model.heads)):
        if trained is not None:
            refuse_seen(texts, name, trained.trained_on)
    options = dict(generation or {})
    return _CalmSweep(
        system=CalmRule.system,
        grid=sweep_grid(threshold_levels("thresholds", list(thresholds)), np.inf),
        fingerprint=calm_fingerprint(model.model, model.classifier, model.heads),
        settings=model.rule.settings(model.n_exits) | ({"generation": options} if options else {}),
        model=model.model,
        texts=texts,
        losses=losses,
        generation=options,
        seed=seed,
        batch_size=checks.count("batch_size", batch_size),
        fast=model,
    ).run(len(texts), run)


@dataclass(kw_only=True)
class _CalmSweep(TextSweep):
    """Sweep with early exits; every sequence of a batch has its own threshold."""

    fast: CalmModel

    def prepare(self, inputs: slice) -> RunBatch:
        """Encode the texts; an encoder runs once on each."""
        source = Source(self.model, self.texts.encoded(inputs, self.model), self.batch_size)

        def run(rows: NDArray[np.int64], columns: NDArray[np.int64]) -> Runs:
            given, levels = source.rows(rows.tolist()), self.grid[columns]
            output = self.fast.generate(
                **given,
                **self.generation,
                thresholds=levels.tolist(),
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
            return Runs(values, same_generation(self.fast.rule, levels, depths, self.grid))

        return run


def same_generation(rule: CalmRule, ran_at: ArrayLike, depths: Depths, grid: Array) -> Array:
    """Return a mask of the thresholds at which each sequence would come out the same, (n, K).

    A token that passed an exit passes it at every higher threshold; one that exited still exits at
    every lower one. `rule` is the run's rule, `ran_at` its threshold for each sequence, (n,).
    """
    layers, confidences = depths.exit_layers, depths.confidences
    n, tokens, n_early = confidences.shape
    exited_here = np.arange(n_early) == layers[:, :, None] - 1
    known = np.nan_to_num(confidences, nan=-np.inf)
    skipped = np.where(exited_here, -np.inf, known).max(axis=2, keepdims=True)
    taken = np.where(exited_here, confidences, np.inf).min(axis=2, keepdims=True)
    own = np.asarray(ran_at, np.float32)
    levels = np.stack([rule.levels(grid, step) for step in range(tokens)])  # (tokens, K)
    own_levels = np.stack([rule.levels(own, step) for step in range(tokens)], axis=1)
    ended = layers == 0
    fits = same_exits(levels, skipped, taken, strict=rule.strict) | ended[:, :, None]
    # An unreachable threshold computes no confidences, so nothing is known of other thresholds.
    compared: Array = np.all(rule.reachable(own_levels) | ended, axis=1, keepdims=True)
    same: Array = (fits.all(axis=1) & compared) | (grid == own.reshape(n, 1))
    return same
