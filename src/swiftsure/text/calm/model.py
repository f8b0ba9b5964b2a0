"""CALM: early-exit generation through a Hugging Face model's own `generate`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from swiftsure._lib import checks
from swiftsure.certify.policy import Policy
from swiftsure.run import threshold_levels
from swiftsure.run.graphs.recorder import CaptureLimits
from swiftsure.text.calm.capture import CapturedDecoding
from swiftsure.text.calm.confidences import confidence_of
from swiftsure.text.calm.continuous import CalmRows
from swiftsure.text.calm.early_exit_decoder import EarlyExitDecoder
from swiftsure.text.calm.meta import MetaClassifier
from swiftsure.text.calm.results import CalmOutput, Depths
from swiftsure.text.calm.rules import CalmRule
from swiftsure.text.calm.sampling import sampling_processors
from swiftsure.text.calm.token_score import TokenScore
from swiftsure.text.decoder import Decoder, decoder_of
from swiftsure.text.exit_heads import ExitHeads
from swiftsure.text.fast_blocks import FastBlocks
from swiftsure.text.generation import (
    check_length,
    check_options,
    check_token_ids,
    end_tokens,
    exclusive,
)
from swiftsure.torch.fingerprinting import fingerprint
from swiftsure.torch.modes import refuse_training

__all__ = ["CalmModel", "EarlyExits", "calm_fingerprint", "early_exits", "with_heads"]


class EarlyExits:
    """What `early_exits` yields: the exit depths of the last generation."""

    def __init__(self, engine: EarlyExitDecoder) -> None:
        self._engine = engine

    @property
    def depths(self) -> Depths:
        """Exit depths of the last generation's tokens."""
        trace = self._engine.trace
        if trace is None or not trace.steps:
            raise RuntimeError("Nothing was generated yet: call the model's `generate` first.")
        return trace.summary(self._engine.decoder, self._engine.confidence)


class CalmModel:
    """A model that generates with early exits.

    Parameters
    ----------
    model : PreTrainedModel
        From a known family, in evaluation mode.
    policy : Policy, CalmRule, float or None
        A policy made from a record of `sweep`, checked against the model once, here; or a rule or
        a threshold, which promises nothing. None runs the full model.
    score : str, optional
        The score for a bare threshold, "softmax" by default. With a policy or a rule, it must be
        the same as theirs.
    classifier : MetaClassifier or TokenScore
        For score "meta" or "learned".
    heads : ExitHeads, optional
        For a model that was not trained to exit early; tokens exit only at blocks with a head.
    capture : bool or CaptureLimits
        Decode over caches of a fixed size: on a GPU through CUDA graphs, captured once per batch
        size and length; on a CPU, on the rows that each block still has to run. The tokens are the
        same. `CaptureLimits` says how much may be captured.
    compile : bool
        With `capture`: compile the decoder's blocks, with merged weights and without repeated keys
        (`swiftsure.text.Family.merged`). The first call of each size takes seconds to minutes. The
        model's linear layers become views of the merged weights, in place; no value changes.

    Attributes
    ----------
    rule : CalmRule
    policy : Policy or None
    capture, compile
        As given.
    n_exits : int
        Number of decoder blocks.

    Raises
    ------
    ValueError
        If the model's family is unknown, the model is in training mode, or the policy was made for
        another model, score or number of exits.
    """

    def __init__(
        self,
        model: Any,
        policy: Policy | CalmRule | float | None = None,
        *,
        score: str | None = None,
        classifier: MetaClassifier | TokenScore | None = None,
        heads: ExitHeads | None = None,
        capture: bool | CaptureLimits = False,
        compile: bool = False,  # noqa: A002 (what torch calls it)
    ) -> None:
        if compile and not capture:
            raise ValueError("`compile` needs `capture`: pass capture=True.")
        self.decoder = with_heads(decoder_of(model), heads)
        if compile:
            self.decoder.fast = FastBlocks(self.decoder)
        refuse_training(model)
        self.model, self.capture, self.compile = model, capture, compile
        self.n_exits = len(self.decoder.blocks)
        self.rule = _resolve_exit_rule(policy, score)
        self.rule.check_exits(self.n_exits)
        self.classifier = classifier
        self.heads = heads
        self.policy = policy if isinstance(policy, Policy) else None
        if self.policy is not None:
            binding = CalmRule.bind(self.policy)
            binding.check_exits(self.n_exits)
            binding.check_model(lambda: calm_fingerprint(model, classifier, heads))
        self._confidence = confidence_of(self.rule, self.decoder, classifier)
        self._captured: CapturedDecoding | None = None
        if capture:
            limits = capture if isinstance(capture, CaptureLimits) else CaptureLimits()
            self._captured = CapturedDecoding(self.decoder, self.rule, self._confidence, limits)

    def generate(
        self,
        input_ids: Tensor | None = None,
        *,
        thresholds: Sequence[float | None] | None = None,
        seed: int = 0,
        sequence_ids: Sequence[int] | None = None,
        **options: Any,
    ) -> CalmOutput:
        """Generate with early exits; takes the arguments of the model's own `generate`.

        With `do_sample=True`, random numbers depend only on the seed, the sequence's id and the
        token's position, so they are the same at every batch size and threshold.

        Parameters
        ----------
        input_ids : (n, positions)
        thresholds : (n,), optional
            One per sequence, instead of the policy's.
        seed, sequence_ids
            For sampling; ids default to positions in the batch.
        **options
            For `generate`; the policy's own options need not be repeated.
        """
        options = self.asked(input_ids, options, seed, sequence_ids)
        if self._captured is not None:
            with exclusive(self.model):
                sequences, trace = self._captured.generate(options, self.levels(thresholds))
            return CalmOutput(sequences, trace.summary(self.decoder, self._confidence))
        config = options.get("generation_config") or self.model.generation_config
        ends = end_tokens(self.model, options.get("eos_token_id", config.eos_token_id))
        with _patched(self.exiting(thresholds, ends)) as run:
            found = self.model.generate(**options, do_sample=False)
        sequences = found if isinstance(found, Tensor) else found.sequences
        return CalmOutput(sequences, run.depths)

    def measure(
        self,
        input_ids: Tensor | None = None,
        *,
        repeats: int = 3,
        seed: int = 0,
        sequence_ids: Sequence[int] | None = None,
        **options: Any,
    ) -> dict[str, float]:
        """Time a generation with early exits and with the full decoder, and keep the faster one.

        From then on, `generate` runs the faster one on batches of this size: on a GPU, early exits
        may be slower where rows exit at different depths. What a policy promises holds for both.

        Parameters
        ----------
        input_ids, seed, sequence_ids, **options
            As for `generate`; inputs as they will come.
        repeats : int
            The best of this many runs counts, after one that captures and compiles.

        Returns
        -------
        seconds : {"early exits": float, "full decoder": float}
            Per token that is written.

        Raises
        ------
        ValueError
            Without `capture`: the full decoder is then the model's own `generate`.
        """
        if self._captured is None:
            raise ValueError("`measure` needs CalmModel(..., capture=True).")
        checks.count("repeats", repeats)
        options = self.asked(input_ids, options, seed, sequence_ids)
        with exclusive(self.model):
            early, full = self._captured.measure(options, self.levels(None), repeats)
        return {"early exits": early, "full decoder": full}

    def rows(self, n: int, positions: int, source: int) -> CalmRows:
        """Return rows whose generations join and leave at any time; see `ContinuousBatch`."""
        limits = CaptureLimits() if self._captured is None else self._captured.budget.limits
        captured = CapturedDecoding(self.decoder, self.rule, self._confidence, limits)
        return CalmRows(self, captured, captured.shape(n, positions, source))

    def asked(
        self,
        input_ids: Tensor | None,
        options: dict[str, Any],
        seed: int,
        sequence_ids: Sequence[int] | None,
    ) -> dict[str, Any]:
        """Return the checked options for `generate`, with those of the policy."""
        options = self._with_policy_options(options)
        if input_ids is not None:
            options["input_ids"] = input_ids
        _check_inputs(self.model, options)
        config = options.get("generation_config") or self.model.generation_config
        if options.pop("do_sample", config.do_sample):
            options |= sampling_processors(options, config, seed, sequence_ids)
        if self.model.training:
            refuse_training(self.model)
        return options

    def exiting(
        self, thresholds: Sequence[float | None] | None, ends: Iterable[int]
    ) -> EarlyExitDecoder:
        """Return what runs the decoder's blocks for one generation."""
        levels = self.levels(thresholds)
        return EarlyExitDecoder(self.decoder, self.rule, self._confidence, levels, ends)

    def levels(self, thresholds: Sequence[float | None] | None) -> NDArray[np.float32]:
        """Return thresholds, the rule's by default."""
        given = self.rule.threshold if thresholds is None else thresholds
        return threshold_levels("thresholds", given)

    def _with_policy_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options merged with the policy's; raise if they contradict it."""
        if self.policy is None:
            return options
        made_for = self.policy.settings.get("generation", {})
        check_options(options, made_for, self.model)
        return {**made_for, **options}


@contextmanager
def early_exits(
    model: Any,
    policy: Policy | CalmRule | float | None,
    *,
    score: str | None = None,
    classifier: MetaClassifier | TokenScore | None = None,
    heads: ExitHeads | None = None,
    thresholds: Sequence[float | None] | None = None,
    eos_token_id: int | Sequence[int] | Literal["model"] | None = "model",
) -> Iterator[EarlyExits]:
    """Make a model's own `generate` exit early within this context.

    For greedy decoding and sampling. Beam search is not supported: beams are reordered, so depths
    would be recorded for the wrong beams.

    Parameters
    ----------
    model : PreTrainedModel
        From a known family (`swiftsure.text.FAMILIES`), in evaluation mode.
    policy, score, classifier, heads
        As in `CalmModel`.
    thresholds : (n,), optional
        One per sequence, instead of the policy's.
    eos_token_id : int, ints, None or "model"
        Tokens that end a sequence in `generate`, if they are not the model's own. Finished
        sequences run no more blocks; on a GPU they still run but are ignored.

    Raises
    ------
    ValueError
        As in `CalmModel`.
    RuntimeError
        If the model already runs with early exits, here or in another thread.

    Examples
    --------
    >>> from transformers import T5Config, T5ForConditionalGeneration
    >>> config = T5Config(
    ...     vocab_size=32,
    ...     d_model=8,
    ...     d_kv=4,
    ...     d_ff=8,
    ...     num_layers=3,
    ...     num_heads=2,
    ...     decoder_start_token_id=0,
    ... )
    >>> model = T5ForConditionalGeneration(config).eval()
    >>> with early_exits(model, 0.9, score="saturation") as run:
    ...     sequences = model.generate(model.dummy_inputs["input_ids"] % 32, max_new_tokens=5)
    >>> run.depths.exit_layers.shape[0], run.depths.mean_layers.max() <= 3
    (3, np.True_)
    """
    fast = CalmModel(model, policy, score=score, classifier=classifier, heads=heads)
    with _patched(fast.exiting(thresholds, end_tokens(model, eos_token_id))) as run:
        yield run


def calm_fingerprint(
    model: nn.Module,
    classifier: MetaClassifier | TokenScore | None = None,
    heads: ExitHeads | None = None,
) -> str:
    """Return the fingerprint of a model with its meta-classifier and exit heads, if any."""
    parts = {"classifier": classifier, "heads": heads}
    given = {name: part for name, part in parts.items() if part is not None}
    return fingerprint(nn.ModuleDict({"model": model, **given}) if given else model)


def with_heads(decoder: Decoder, heads: ExitHeads | None) -> Decoder:
    """Attach exit heads to a decoder and return it; raise if they do not fit the model."""
    if heads is not None:
        width, n_blocks = int(decoder.head.weight.shape[1]), len(decoder.blocks)
        if heads.width != width or heads.exits[-1] >= n_blocks - 1:
            raise ValueError(
                f"`heads` are for states of width {heads.width} and a block after number"
                f" {heads.exits[-1] + 1}, but the model has width {width} and {n_blocks} blocks."
            )
    decoder.exit_heads = heads
    return decoder


def _resolve_exit_rule(given: Policy | CalmRule | float | None, score: str | None) -> CalmRule:
    """Return the exit rule for a policy, a rule or a bare threshold, with this score."""
    rule = CalmRule.of(given)
    if score is None or score == rule.score:
        return rule
    if isinstance(given, Policy):
        CalmRule.bind(given).check_score(score)
    if isinstance(given, CalmRule):
        raise ValueError(f"`policy` is a rule with score {rule.score!r}, but got {score!r}.")
    return replace(rule, score=score)


@contextmanager
def _patched(engine: EarlyExitDecoder) -> Iterator[EarlyExits]:
    """Route the decoder, its blocks and the head through the engine within this context."""
    decoder = engine.decoder
    with exclusive(decoder.model), ExitStack() as undo:
        for index, block in enumerate(engine.blocks):
            undo.enter_context(_replaced_forward(block, partial(engine.run_block, index)))
        undo.enter_context(_replaced_forward(decoder.stack, engine.run_stack))
        undo.enter_context(_replaced_forward(decoder.head, engine.run_head))
        undo.callback(engine.release)
        yield EarlyExits(engine)


@contextmanager
def _replaced_forward(module: nn.Module, through: Callable[..., Any]) -> Iterator[None]:
    """Replace a module's forward method by one whose first argument is the original."""
    own: Any = module.__dict__
    before = own.get("forward")
    own["forward"] = partial(through, module.forward)
    try:
        yield
    finally:
        if before is None:
            del own["forward"]
        else:
            own["forward"] = before


def _check_inputs(model: Any, options: dict[str, Any]) -> None:
    """Raise for options that early exits do not support or that `generate` fails on unclearly."""
    config = options.get("generation_config") or model.generation_config
    beams = options.get("num_beams") or config.num_beams or 1
    if beams > 1:
        raise ValueError(
            f"`num_beams` must be 1, but is {beams} here or in the model's generation_config: beams"
            " are reordered, so exit depths would be recorded for the wrong ones."
        )
    for name in ("assistant_model", "prompt_lookup_num_tokens"):
        if options.get(name) is not None:
            raise ValueError(f"`{name}` feeds several tokens at once, which cannot exit early.")
    if options.get("use_cache") is False:
        raise ValueError("`use_cache` must not be False: later tokens attend to cached states.")
    inputs = options.get("input_ids")
    if not isinstance(inputs, Tensor):
        return
    check_token_ids(inputs)
    check_length(model, inputs.shape[1], options.get("max_new_tokens") or 0)
