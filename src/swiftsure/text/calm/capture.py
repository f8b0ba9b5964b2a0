"""Captured generation with early exits: `generate` prepares, a loop over fixed buffers decodes."""

from collections.abc import Hashable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    StoppingCriteriaList,
)

from swiftsure.run.graphs.recorder import CaptureBudget, CaptureLimits, Recorder
from swiftsure.text.calm.confidences import Confidence
from swiftsure.text.calm.device_loop import DeviceLoop
from swiftsure.text.calm.loops import Found, Loop, RegroupingLoop, Request
from swiftsure.text.calm.results import Trace
from swiftsure.text.calm.rules import CalmRule, check_thresholds
from swiftsure.text.calm.session import WINDOW, Session
from swiftsure.text.decoder import Decoder
from swiftsure.text.session_cache import SessionCache
from swiftsure.text.static_decoder import StaticShape

__all__ = ["CapturedDecoding", "Plan", "Prepared"]

UNSUPPORTED = ("inputs_embeds", "decoder_inputs_embeds", "token_type_ids", "streamer")
"""Arguments of `generate` that captured decoding does not take."""
LARGEST_GROUP = {"cpu": 64}
"""Rows that a block takes at once when rows are regrouped, by device."""
INPUTS = ({"input_ids", "attention_mask"}, {"encoder_outputs", "attention_mask"})
"""Tensors that a generation may be given, if its plan is to be kept."""
LARGEST = 64
"""Number of plans that are kept."""


@dataclass(frozen=True)
class Plan:
    """What a generation depends on besides its inputs."""

    start: Tensor
    """(1, positions) before the first answer token."""
    tokens: int
    """Largest number of answer tokens."""
    ends: tuple[int, ...]
    barred: int
    """Number of answer tokens before which no end token is picked."""
    pad: int


@dataclass(frozen=True)
class Prepared:
    """A generation that `generate` has prepared."""

    input_ids: Tensor
    """(m, positions) before the first answer token."""
    plan: Plan
    arguments: dict[str, Any]
    processors: Any = None
    """Logits processors that the host runs; None: none."""
    criteria: Any = None
    """Stopping criteria that the host runs; None: none."""

    @property
    def by_host(self) -> bool:
        """Whether the host has to see each token before the next one begins."""
        return self.processors is not None or self.criteria is not None

    @property
    def source(self) -> Tensor | None:
        """The encoder's states or its token ids, (m, positions, ...); None for causal models."""
        encoded = self.arguments.get("encoder_outputs")
        return self.arguments.get("source_ids") if encoded is None else encoded[0]


class CapturedDecoding:
    """Runs a decoder with early exits over fixed buffers, and keeps what it captured.

    Parameters
    ----------
    decoder : Decoder
    rule : CalmRule
    confidence : Confidence
    limits : CaptureLimits

    Attributes
    ----------
    full : set of StaticShape
        Sizes of generations that run the full decoder, since it took less time (`measure`).
    """

    def __init__(
        self,
        decoder: Decoder,
        rule: CalmRule,
        confidence: Confidence,
        limits: CaptureLimits,
    ) -> None:
        self.decoder, self.rule, self.confidence = decoder, rule, confidence
        self.budget = CaptureBudget(limits)
        parts = decoder.model, decoder.exit_heads, getattr(confidence, "classifier", None)
        self._loops: SessionCache[Loop] = SessionCache(parts)
        self._recorder: Recorder | None = None
        """Of all sessions, which never run at the same time; making one takes a millisecond."""
        self._plans = _Plans(decoder.model)
        self.full: set[StaticShape] = set()

    # ----------------------------------------------------------------------------- what is asked

    def prepare(self, options: dict[str, Any]) -> Prepared:
        """Prepare a generation as the model's own `generate` does, or as it did before."""
        plan = self._plans.get(options)
        if plan is not None:
            arguments = {**options, "source_ids": options.get("input_ids")}
            given = options.get("input_ids")
            source = options["encoder_outputs"][0] if given is None else given
            return Prepared(plan.start.expand(len(source), -1), plan, arguments)
        found: list[Prepared] = []

        def keep(
            model: Any,
            input_ids: Tensor,
            logits_processor: LogitsProcessorList,
            stopping_criteria: StoppingCriteriaList,
            generation_config: Any,
            **arguments: Any,
        ) -> Tensor:
            _check_arguments(arguments)
            input_ids = input_ids.to(model.device)
            prompt = input_ids.shape[1]
            ends, criteria = _split_criteria(stopping_criteria)
            barred, processors = _split_processors(logits_processor, prompt, ends)
            pad = generation_config.pad_token_id
            plan = Plan(
                start=input_ids[:1],
                tokens=int(generation_config.max_length) - prompt,
                ends=tuple(sorted(ends)),
                barred=barred,
                pad=int(pad) if pad is not None else 0,
            )
            if criteria is None and processors is None:
                self._plans.keep(options, plan)
            found.append(Prepared(input_ids, plan, arguments, processors, criteria))
            return input_ids

        self.decoder.model.generate(**options, do_sample=False, custom_generate=keep)
        return found[0]

    # ------------------------------------------------------------------------------ all at once

    def generate(
        self, options: dict[str, Any], thresholds: NDArray[np.float32]
    ) -> tuple[Tensor, Trace]:
        """Generate with the model's own preparation; return sequences and what happened."""
        prepared = self.prepare(options)
        with torch.inference_mode():
            sequences, trace = self._generate(prepared, thresholds)
        return sequences.clone(), trace

    def measure(
        self, options: dict[str, Any], thresholds: NDArray[np.float32], repeats: int
    ) -> tuple[float, float]:
        """Return seconds per token of early exits and of the full decoder, and keep the faster one.

        Generations of other sizes stay as they are.
        """
        prepared = self.prepare(options)
        n, prompt = prepared.input_ids.shape
        source = prepared.source
        length = 0 if source is None else source.shape[1]
        shape = self.shape(n, prompt + prepared.plan.tokens, length)
        best = [np.inf, np.inf]
        with torch.inference_mode():
            for repeat in range(repeats + 1):  # the first captures
                for full in (False, True):
                    (self.full.add if full else self.full.discard)(shape)
                    start = perf_counter()
                    sequences, trace = self._generate(prepared, thresholds)
                    sequences.cpu()  # waits for a GPU
                    took = perf_counter() - start
                    log: Any = trace.log
                    if repeat > 0:
                        best[full] = min(best[full], took / int((log[0] > 0).sum()))
        early, whole = best
        (self.full.add if whole < early else self.full.discard)(shape)
        return early, whole

    def _generate(
        self, prepared: Prepared, thresholds: NDArray[np.float32]
    ) -> tuple[Tensor, Trace]:
        n, prompt = prepared.input_ids.shape
        check_thresholds(thresholds, n)
        source, plan = prepared.source, prepared.plan
        shape = self.shape(n, prompt + plan.tokens, 0 if source is None else source.shape[1])
        if shape in self.full:
            thresholds = np.full_like(thresholds, np.inf)
        loop = self.loop(shape, plan, by_host=prepared.by_host)
        answers: list[list[int]] = [[] for _ in range(n)]
        found = self.join(loop, range(n), prepared, thresholds)
        while True:
            for each in found:
                answers[each.row].append(each.token)
            if not loop.active.any():
                break
            found = loop.advance()
        longest = max(map(len, answers))
        padded = [[*each, *[plan.pad] * (longest - len(each))] for each in answers]
        sequences = torch.cat([prepared.input_ids, torch.tensor(padded).to(prepared.input_ids)], 1)
        trace = self.trace(prepared)
        trace.log = loop.log(range(n))
        return sequences, trace

    def trace(self, prepared: Prepared) -> Trace:
        """Return the trace of a generation, without its log."""
        n, prompt = prepared.input_ids.shape
        attended = _attended(prompt, prepared.source, prepared.arguments.get("attention_mask"))
        return Trace(n, len(self.decoder.blocks), prompt, attended)

    # ------------------------------------------------------------------------------------- a loop

    def shape(self, n: int, positions: int, source: int) -> StaticShape:
        """Return the sizes of a session; they are rounded up, so that few are made."""
        captures = self.recorder.captures
        capacity = _rounded(positions + 1 + WINDOW, 64 if captures else 32)
        return StaticShape(n, capacity, _rounded(source, 32 if captures else 8))

    @property
    def recorder(self) -> Recorder:
        """The recorder of all sessions, on the model's device."""
        device = self.decoder.model.device
        if self._recorder is None or self._recorder.device != device:
            self._recorder = Recorder(device, budget=self.budget)
        return self._recorder

    def loop(self, shape: StaticShape, plan: Plan, *, by_host: bool) -> Loop:
        """Return the loop for sequences of these sizes, without any.

        On a GPU the device decides, unless the host has to see each token (`by_host`).
        """
        if self.decoder.fast is not None:
            self.decoder.fast.refresh()  # before `get`, which sees weights that move
        key = shape, len(plan.ends), by_host
        loop = self._loops.get(
            key,
            lambda: self.new_loop(shape, plan, by_host=by_host),
            unlimited=self.recorder.captures,
        )
        loop.leave(range(shape.n))
        loop.set_ends(plan.ends, plan.pad)
        return loop

    def new_loop(self, shape: StaticShape, plan: Plan, *, by_host: bool) -> Loop:
        """Return a loop that no other generation shares."""
        recorder, n_ends = self.recorder, len(plan.ends)
        if self.decoder.fast is not None:
            self.decoder.fast.refresh()
        with recorder.buffers():
            session = Session(self.decoder, self.rule, self.confidence, shape, n_ends, recorder)
            if recorder.branches and session.shortlist is None and not by_host:
                loop: Loop = DeviceLoop(session)
            else:
                loop = RegroupingLoop(session, LARGEST_GROUP.get(recorder.device.type, shape.n))
        loop.set_ends(plan.ends, plan.pad)
        return loop

    def join(
        self, loop: Loop, rows: Sequence[int], prepared: Prepared, thresholds: NDArray[np.float32]
    ) -> list[Found]:
        """Begin a prepared generation in free rows of a loop; return what `Loop.join` does."""
        session, plan = loop.session, prepared.plan
        prompt, index = prepared.input_ids.shape[1], None
        if len(rows) < loop.n:
            index = torch.tensor(list(rows), device=session.device)
        loop.settle()
        encoded, mask = (prepared.arguments.get(n) for n in ("encoder_outputs", "attention_mask"))
        if encoded is not None:
            session.static.load_source(encoded[0].to(session.device), mask, index)
        elif prepared.source is not None:
            session.encode(prepared.source, prepared.arguments["attention_mask"], rows)
        logits = None
        if prepared.source is None or prompt > 1:
            logits = self._prefill(session, prepared, index)
        else:
            session.static.reset(prepared.arguments.get("decoder_attention_mask"), None, index)
        may_exit = self._may_exit(thresholds, plan.tokens, at_first=logits is None)
        request = Request(
            input_ids=prepared.input_ids,
            levels=self._levels(thresholds, len(rows), plan.tokens),
            may_exit=may_exit,
            barred=plan.barred,
            first_logits=logits,
            processors=prepared.processors,
            criteria=prepared.criteria,
        )
        return loop.join(rows, request)

    def _levels(self, thresholds: NDArray[np.float32], n: int, tokens: int) -> NDArray[np.float32]:
        each = np.broadcast_to(thresholds, (n,))
        if self.rule.decay is None:
            return np.ascontiguousarray(np.broadcast_to(each[:, None], (n, tokens)), np.float32)
        return np.stack([self.rule.levels(each, step) for step in range(tokens)], axis=1)

    def _may_exit(
        self, thresholds: NDArray[np.float32], tokens: int, *, at_first: bool
    ) -> NDArray[np.bool_]:
        """Return at which tokens a row can exit: not at the one that follows a prompt."""
        steps = range(tokens if self.rule.decay is not None else 1)
        found = [bool(self.rule.reachable(self.rule.levels(thresholds, k)).any()) for k in steps]
        return np.broadcast_to(found, tokens) & ((np.arange(tokens) > 0) | at_first)

    def _prefill(self, session: Session, prepared: Prepared, rows: Tensor | None) -> Tensor:
        """Run the model on the prompts and keep their cache; return the next token's logits."""
        input_ids, arguments = prepared.input_ids, prepared.arguments
        model, mask = self.decoder.model, arguments.get("attention_mask")
        crossed = bool(model.config.is_encoder_decoder)
        # Without its configuration, so that sliding windows keep all positions.
        own: Any = DynamicCache()
        given: dict[str, Any] = {"use_cache": True, "attention_mask": mask}
        padding = None
        if crossed:
            given |= {
                "decoder_input_ids": input_ids,
                "encoder_outputs": arguments["encoder_outputs"],
                "past_key_values": EncoderDecoderCache(own, DynamicCache()),
            }
            mask = arguments.get("decoder_attention_mask")
            if mask is not None:
                given["decoder_attention_mask"] = mask
        else:
            given |= {"input_ids": input_ids, "past_key_values": own}
            for name in ("position_ids", "logits_to_keep"):
                if arguments.get(name) is not None:
                    given[name] = arguments[name]
            if "position_ids" in given:
                last = given["position_ids"][:, -1:]
                padding = input_ids.shape[1] - 1 - last.expand(len(input_ids), 1)
        logits: Tensor = model(**given).logits[:, -1]
        session.static.load_prompt(own.layers, mask, padding, rows)
        return logits.float()


class _Plans:
    """Plans by the options of `generate`, for a model with an encoder.

    Preparing a generation takes `generate` 1 to 2 ms, as long as a small model writes ten tokens.

    Only for options that are numbers, and as long as the model's own options stay the same.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._kept: dict[Hashable, Plan] = {}
        self._config: dict[str, Any] = {}

    def get(self, options: dict[str, Any]) -> Plan | None:
        """Return the plan for these options; None if `generate` has to prepare."""
        key = self._key(options)
        if key is None or self._config != vars(self._model.generation_config):
            return None
        return self._kept.get(key)

    def keep(self, options: dict[str, Any], plan: Plan) -> None:
        """Keep a plan if it depends on nothing but these options."""
        key = self._key(options)
        if key is None or plan.start.shape[1] != 1:
            return
        now = vars(self._model.generation_config)
        if self._config != now or len(self._kept) >= LARGEST:
            self._kept, self._config = {}, deepcopy(now)
        self._kept[key] = plan

    def _key(self, options: dict[str, Any]) -> Hashable | None:
        if not self._model.config.is_encoder_decoder:
            return None
        device = self._model.device
        key: list[tuple[str, Hashable]] = []
        tensors: set[str] = set()
        for name, value in sorted(options.items()):
            given = value[0] if name == "encoder_outputs" else value
            if isinstance(given, Tensor) and given.device == device:
                tensors.add(name)
            elif isinstance(value, int | float | None):
                key.append((name, value))
            elif isinstance(value, list | tuple) and all(isinstance(each, int) for each in value):
                key.append((name, tuple(value)))
            else:
                return None
        return (device, *key) if tensors in INPUTS else None


def _check_arguments(arguments: dict[str, Any]) -> None:
    for name in UNSUPPORTED:
        if arguments.get(name) is not None:
            raise ValueError(
                f"`{name}` is not supported with capture=True: leave it out, or generate without"
                " capture."
            )
    cache = arguments.get("past_key_values")
    if cache is not None and int(cache.get_seq_length()) > 0:
        raise ValueError(
            "`past_key_values` must be empty with capture=True, whose caches have a fixed size:"
            " generate without capture to continue from a cache."
        )


def _split_criteria(criteria: StoppingCriteriaList) -> tuple[frozenset[int], Any]:
    """Return the end tokens, and the criteria that the host has to run; None: there are none."""
    ends: set[int] = set()
    for each in criteria:
        if isinstance(each, EosTokenCriteria):
            ends.update(each.eos_token_id.tolist())
    known = (EosTokenCriteria, MaxLengthCriteria)
    return frozenset(ends), None if all(type(each) in known for each in criteria) else criteria


def _split_processors(
    processors: LogitsProcessorList, prompt: int, ends: frozenset[int]
) -> tuple[int, Any]:
    """Return how many tokens come before an end at least, and the processors of the host."""
    barred = 0
    for each in processors:
        if type(each) is MinNewTokensLengthLogitsProcessor:
            found = int(each.min_new_tokens) + int(each.prompt_length_to_skip) - prompt
        elif type(each) is MinLengthLogitsProcessor:
            found = int(each.min_length) - prompt
        else:
            return 0, processors
        if set(each.eos_token_id.tolist()) != ends:
            return 0, processors
        barred = max(barred, found)
    return barred, None


def _attended(prompt: int, source: Tensor | None, mask: Tensor | None) -> Tensor | int:
    """Return how many positions the first token attends to, without padding."""
    if source is None:
        return prompt if mask is None else mask.sum(dim=1)
    return prompt + (source.shape[1] if mask is None else mask.sum(dim=1))


def _rounded(size: int, step: int) -> int:
    return -(-size // step) * step
