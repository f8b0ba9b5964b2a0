"""`TextEngine`: a language model that exits early, or a pair of models, as an engine."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from swiftsure.certify.slices import any_part
from swiftsure.losses import LOSSES
from swiftsure.serve.engine import (
    Answer,
    AnyPolicy,
    Comparison,
    Description,
    EngineOptions,
    ExitCosts,
    InvalidRequestError,
    Part,
    answer_by_steps,
)
from swiftsure.serve.engines.by_slice import policies_of
from swiftsure.text import BigLittle, CalmModel, ContinuousBatch
from swiftsure.text.folder import load_system
from swiftsure.text.generation import end_tokens

__all__ = ["TextEngine", "TextInputs", "TextRequest"]

LONGEST_PROMPT = 2_048
"""Tokens of a prompt, where the model itself has no limit."""
OPTIONS = {"max_tokens": int, "temperature": float, "top_p": float, "seed": int}
"""Options of a request, beside `stop`."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What stands at the end of a text whose last character still lacks bytes."""


@dataclass(frozen=True)
class TextRequest:
    """A request for text.

    Attributes
    ----------
    prompt : str, optional
    messages : list of dict, optional
        A chat instead of a prompt, for the tokenizer's chat template.
    options : dict
        Of `generate`.
    seed : int
        Of random numbers.
    stop : tuple of str
        Texts before which the answer ends.
    stream : bool
        Whether parts of the answer are wanted.
    """

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    stop: tuple[str, ...] = ()
    stream: bool = False


class TextInputs:
    """Checks requests for text: a text, or an object with `prompt` or `messages` and options."""

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of one sample."""
        names = {int: "integer", float: "number"}
        options: dict[str, Any] = {name: {"type": names[kind]} for name, kind in OPTIONS.items()}
        stop = {"type": ["string", "array"], "items": {"type": "string"}}
        prompt = {"type": "string"}
        fields = {"prompt": prompt, **options, "stop": stop}
        return {"anyOf": [prompt, {"type": "object", "properties": fields, "required": ["prompt"]}]}

    def sample(self, inputs: Any) -> TextRequest:
        """Return a checked request."""
        given = {"prompt": inputs} if isinstance(inputs, str) else inputs
        if not isinstance(given, dict):
            raise InvalidRequestError("`inputs` must be a text, or an object with a `prompt`.")
        known = {"prompt", "messages", "stop", "stream", *OPTIONS}
        if unknown := given.keys() - known:
            raise InvalidRequestError(f"`{min(unknown, key=str)!s:.60}` is not an option here.")
        prompt, messages = given.get("prompt"), given.get("messages")
        if (prompt is None) == (messages is None) or not (messages or isinstance(prompt, str)):
            raise InvalidRequestError("`prompt` must be a text, or `messages` a list of objects.")
        if prompt == "":
            raise InvalidRequestError("`prompt` must not be empty.")
        values = {name: given[name] for name in OPTIONS if given.get(name) is not None}
        for name, value in values.items():
            _check_option(name, value)
        seed = values.pop("seed", None)
        return TextRequest(
            prompt,
            messages,
            _generate_options(values),
            random.SystemRandom().getrandbits(31) if seed is None else seed,
            _stop_texts(given.get("stop")),
            given.get("stream") is True,
        )

    def covers(self, sample: TextRequest, policy: AnyPolicy) -> bool:
        """Return whether a request's options are those with which a policy was made."""
        made_for = {"do_sample": False, **_made_for(policy)}
        return not sample.stop and sample.options.items() <= made_for.items()

    def samples(self, _inputs: Any) -> None:
        """Return None: an array holds no texts."""
        return


@dataclass(eq=False)
class _Row:
    """A request under way."""

    key: int
    sample: TextRequest
    prompt: int
    """Tokens of the prompt."""
    full: bool
    told: str = ""
    """Text that was returned in parts."""


class TextEngine:
    """Answers requests for text with a `CalmModel`, or a `BigLittle` pair, under its policy.

    The tokens are those of `generate` with each request alone. Requests whose options differ from
    those with which the policy was made are answered by the full model.

    Parameters
    ----------
    system : CalmModel or BigLittle
        With a policy.
    tokenizer
        Of its model.
    room : int
        How many requests are under way at once.
    """

    lanes = 1
    policy: AnyPolicy

    def __init__(
        self, system: CalmModel | BigLittle, tokenizer: Any, *, name: str = "text", room: int = 8
    ) -> None:
        if system.policy is None:
            raise ValueError("`system` must have a policy: a threshold alone promises nothing.")
        self.system, self.tokenizer, self.name, self.room = system, tokenizer, name, room
        self.inputs = TextInputs()
        self.policy = system.policy
        self._systems: dict[str | None, CalmModel | BigLittle] = {None: system}
        self._full = _without_policy(system)
        self._rows: dict[Any, _Row] = {}
        self._batch = self._new_batch()
        if isinstance(system, CalmModel):
            self.n_exits = system.n_exits
            exits = tuple(float(k + 1) for k in range(self.n_exits))
            self.costs = {"layers": ExitCosts(exits, exits[-1])}
        else:
            self.n_exits, self.costs = 2, {}
        self._ends = end_tokens(self._model, "model")

    @classmethod
    def load(cls, folder: str | Path, options: EngineOptions | None = None) -> Self:
        """Return the engine of a folder from `swiftsure.text.save_system`."""
        chosen = options or EngineOptions()
        chosen.refuse_unused("a text system", "device", "capture", "compile", "threads")
        if chosen.threads is not None:
            torch.set_num_threads(chosen.threads)
        system, tokenizer = load_system(
            folder, device=chosen.device, capture=chosen.capture, compile=chosen.compile
        )
        return cls(system, tokenizer, name=Path(folder).resolve().name, room=chosen.room)

    @property
    def _model(self) -> Any:
        return self.system.model if isinstance(self.system, CalmModel) else self.system.large

    def _new_batch(self) -> ContinuousBatch:
        config, made_for = self._model.config, _made_for(self.policy)
        limit = getattr(config, "max_position_embeddings", None)
        answer = made_for.get("max_new_tokens") or self._model.generation_config.max_length or 20
        positions = limit or LONGEST_PROMPT + answer
        if config.is_encoder_decoder:
            positions = limit or max(2, answer)
        source = min(limit or LONGEST_PROMPT, LONGEST_PROMPT)
        return ContinuousBatch(
            next(iter(self._systems.values())),
            rows=self.room,
            positions=min(positions, LONGEST_PROMPT + answer),
            source=source,
        )

    def describe(self) -> Description:
        """Return what goes in and out."""
        outputs = {
            "text": {"type": "string"},
            "finish_reason": {"type": "string", "enum": ["stop", "length"]},
            "prompt_tokens": {"type": "integer"},
            "completion_tokens": {"type": "integer"},
        }
        schema = self.inputs.schema()
        return Description(self.name, schema, outputs, "A text", arrays=False, completions=True)

    def measure(self) -> None:
        """Do nothing: what an answer costs depends on its tokens, and is known afterwards."""

    def check(self, policy: AnyPolicy) -> None:
        """Raise if a policy was made for another model or rule."""
        self._systems_of(policy)

    def check_loss(self, loss: str) -> None:
        """Raise if a loss cannot be computed from two texts."""
        LOSSES.choose(loss).function("against_last")

    def install(self, policy: AnyPolicy) -> None:
        """Use another policy; nothing is under way."""
        self._systems, self.policy = self._systems_of(policy), policy
        self._batch = self._new_batch()

    def _systems_of(self, policy: AnyPolicy) -> dict[str | None, CalmModel | BigLittle]:
        """Return the system under the policy of each slice."""
        found = {name: _under(self.system, own) for name, own in policies_of(policy).items()}
        rules = [each.rule for each in found.values()]
        if any(_but_dial(rule) != _but_dial(rules[0]) for rule in rules):
            raise ValueError("`policy` must have one rule for all slices, but for the dial.")
        return found

    def answer(
        self, samples: Sequence[Any], *, full: bool, slices: Sequence[str | None] = ()
    ) -> list[Answer | InvalidRequestError]:
        """Return one answer per sample."""
        return answer_by_steps(self, samples, full=full, slices=slices)

    def join(
        self, key: int, sample: TextRequest, *, full: bool, slice_name: str | None = None
    ) -> InvalidRequestError | None:
        """Add a request to those under way."""
        system = self._systems.get(slice_name if None not in self._systems else None)
        full = full or system is None or not self.inputs.covers(sample, self.policy)
        options = {**_made_for(self.policy), **sample.options}
        if isinstance(self.system, CalmModel) and options.get("do_sample"):
            options["seed"] = sample.seed
        elif not isinstance(self.system, CalmModel):
            options["seed"] = sample.seed
            if not options.pop("do_sample", False):
                options = {k: v for k, v in options.items() if k not in ("temperature", "top_p")}
        try:
            ids = self._encoded(sample)
            under = self._full if full else system
            generation = self._batch.submit(ids, full=full, under=under, **options)
        except (ValueError, TypeError, KeyError) as error:
            return InvalidRequestError(" ".join(str(error).split())[:500])
        self._rows[generation] = _Row(key, sample, ids.shape[1], full)
        return None

    def step(self) -> list[tuple[int, Part | Answer | InvalidRequestError]]:
        """Advance all requests under way, by a token or so."""
        found: list[tuple[int, Part | Answer | InvalidRequestError]] = []
        try:
            changed = self._batch.step()
        except BaseException:
            for generation in self._rows:
                generation.cancel()
            self._rows.clear()
            raise
        for generation in changed:
            row = self._rows[generation]
            text, stopped = _until(self._decoded(generation.tokens), row.sample.stop)
            ended = generation.ended or stopped
            if row.sample.stream and (part := _sure(text, row.sample.stop, ended)[len(row.told) :]):
                row.told += part
                found.append((row.key, Part(part)))
            if ended:
                generation.cancel()
                found.append((row.key, self._answer(row, generation, text, stopped)))
                del self._rows[generation]
        return found

    def leave(self, key: int) -> None:
        """Give a request up."""
        for generation, row in list(self._rows.items()):
            if row.key == key:
                generation.cancel()
                del self._rows[generation]

    def compare(self, sample: Any, answer: Answer, loss: str) -> Comparison:
        """Return how a text compares with the full model's answer, which is the sample."""
        if isinstance(sample, Exception):
            raise sample
        both = np.asarray([[answer.output, sample.output]], object)
        lost = LOSSES.choose(loss).function("against_last")(both)
        return Comparison(float(lost[0, 0]))

    def _encoded(self, sample: TextRequest) -> torch.Tensor:
        if sample.messages is None:
            ids = self.tokenizer(sample.prompt, return_tensors="pt")["input_ids"]
        elif self.tokenizer.chat_template is None:
            raise ValueError("The model has no chat template: send a `prompt`.")
        else:
            ids = self.tokenizer.apply_chat_template(
                sample.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
        if ids.shape[1] == 0:
            raise ValueError("`prompt` must have at least one token.")
        return ids.to(self._model.device)  # type: ignore[no-any-return]

    def _decoded(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _answer(self, row: _Row, generation: Any, text: str, stopped: bool) -> Answer:
        tokens, run = generation.tokens, generation.result
        content = {
            "text": text,
            "finish_reason": "stop" if stopped or tokens[-1] in self._ends else "length",
            "prompt_tokens": row.prompt,
            "completion_tokens": len(tokens),
        }
        last = self.n_exits - 1
        if run is None or row.full:
            exit_, costs = last, None
        elif isinstance(self.system, CalmModel):
            layers = float(run.exit_layers.sum())
            exit_ = min(last, int(np.ceil(layers / len(tokens))) - 1)
            costs = {"layers": (layers, float(len(tokens) * self.n_exits))}
        else:
            exit_, costs = int(run.drafted == 0), {"flops": (run.flops, run.alone_flops)}
        return Answer(content, exit_, None, text, costs)


def _under(system: CalmModel | BigLittle, policy: Any) -> CalmModel | BigLittle:
    """Return the same models under a policy or a rule, run in the same way."""
    how: Any = {"capture": system.capture, "compile": system.compile}
    if isinstance(system, CalmModel):
        parts: Any = {"classifier": system.classifier, "heads": system.heads}
        return CalmModel(system.model, policy, **parts, **how)
    return BigLittle(system.large, system.small, policy, **how)


def _but_dial(rule: Any) -> Any:
    return replace(rule, threshold=None) if hasattr(rule, "threshold") else rule.at(None)


def _without_policy(system: CalmModel | BigLittle) -> CalmModel | BigLittle:
    """Return the full model, which takes any options."""
    return _under(system, _but_dial(system.rule))


def _made_for(policy: AnyPolicy) -> dict[str, Any]:
    """Return the options of `generate` with which a policy was made."""
    return dict(any_part(policy).settings.get("generation") or {})


def _check_option(name: str, value: Any) -> None:
    whole = OPTIONS[name] is int
    numbers = int if whole else int | float
    low, high = {
        "max_tokens": (1, 1 << 20),
        "temperature": (0, 10),
        "top_p": (1e-6, 1),
        "seed": (0, 2**63 - 1),
    }[name]
    if isinstance(value, bool) or not isinstance(value, numbers) or not low <= value <= high:
        kind = "a whole number" if whole else "a number"
        raise InvalidRequestError(f"`{name}` must be {kind} in [{low:g}, {high:g}].")


def _generate_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return OpenAI's options as those of `generate`."""
    found: dict[str, Any] = {}
    if "max_tokens" in given:
        found["max_new_tokens"] = given["max_tokens"]
    if "temperature" in given:
        found["do_sample"] = given["temperature"] > 0
    if found.get("do_sample"):
        found["temperature"] = float(given["temperature"])
        if "top_p" in given:
            found["top_p"] = float(given["top_p"])
    return found


def _stop_texts(given: Any) -> tuple[str, ...]:
    if given is None:
        return ()
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not all(isinstance(each, str) and each for each in texts):
        raise InvalidRequestError("`stop` must be a text, or a list of texts.")
    return tuple(texts)


def _until(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """Return a text up to the first of the texts at which it stops, and whether it does."""
    places = [text.index(each) for each in stop if each in text]
    return (text[: min(places)], True) if places else (text, False)


def _sure(text: str, stop: Sequence[str], ended: bool) -> str:
    """Return the part of a text that more tokens will not change, or cut off."""
    if ended:
        return text
    held = max((len(each) - 1 for each in stop), default=0)
    text = text[: len(text) - held] if held else text
    return text.rstrip(UNFINISHED)
