"""`Cascade`: models that you may not own, asked one after another, cheapest first."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure.cascade.answer_features import DEFAULT_ANSWER_FEATURES, feature_values
from swiftsure.cascade.answer_log import AnswerKey
from swiftsure.cascade.answer_losses import answer_tables, chosen_losses
from swiftsure.cascade.answers import Answer
from swiftsure.cascade.collecting import ask_all, input_keys, model_key, rows_of
from swiftsure.cascade.confidences import ANSWER_SCORES, answer_confidence
from swiftsure.cascade.endpoints import warn_of_prices
from swiftsure.cascade.judging import Judge, judge_tables
from swiftsure.cascade.models import Model, TorchModel, identity_digest, model_of
from swiftsure.cascade.request_kinds import REQUESTS, features_of_inputs
from swiftsure.cascade.retrying import Backoff
from swiftsure.cascade.router import Router
from swiftsure.cascade.running import CascadeRunner, run_coroutine
from swiftsure.cascade.wrapping import LearnedConfidence
from swiftsure.certify.calibration import DELTA, Calibration, Missing, stated_promises
from swiftsure.certify.control import Control
from swiftsure.certify.policy import Policy
from swiftsure.certify.promise import CostPromise, Promise
from swiftsure.certify.slices import SlicedPolicy
from swiftsure.curves.paths import PathLike
from swiftsure.curves.pilots import PilotPath, learned_on
from swiftsure.losses import LossRange
from swiftsure.records import ExitRecord
from swiftsure.records.checks import gap_is_known_by_agreement
from swiftsure.records.routing import ROUTER
from swiftsure.run.binding import PolicyBinding
from swiftsure.scores import LearnedScore

if TYPE_CHECKING:
    from swiftsure.torch import Cascade as StagedCascade

__all__ = ["Cascade", "record_of_answers"]

SECONDS, VERSIONS = "seconds", "versions"
ROUTER_PILOT = 0.25
"""Share of the samples that finds the settings of a router and thresholds, by default."""
SYSTEM_NAME, RECORD_FROM = "cascade", "Cascade.collect"


class Cascade:
    """Models in a row, cheapest first; each is asked only if those before it are not sure enough.

    Parameters
    ----------
    models : sequence, or mapping of names to models
        At least 2. Each is one of:

        - a function from one input to `Answer(answer, confidence=..., cost=...)`, or to anything
          else that `Answer.of` understands; plain or async;
        - an `Endpoint`, a language model behind an OpenAI-compatible API;
        - a fitted scikit-learn classifier, with `predict_proba`;
        - a PyTorch classifier in evaluation mode. To run modules on whole batches and devices, see
          `staged`.

        The last is the one that the others are compared with. A `Router` may stand before the
        first: inputs that it finds hopeless enough go straight to the last model.
    scores : str or several
        Confidences to decide by, among `swiftsure.cascade.ANSWER_SCORES` or names in
        `Answer.scores`. A record holds all of them; a policy uses one.

    Examples
    --------
    >>> small = lambda number: ("odd", 0.9 if number % 2 else 0.3, 1.0)
    >>> large = lambda number: ("odd" if number % 2 else "even", 1.0, 10.0)
    >>> cascade = Cascade({"small": small, "large": large})
    >>> record = cascade.collect(range(400), labels=["even", "odd"] * 200)
    >>> policy = cascade.calibrate(record, epsilon=0.05)
    >>> out = cascade.run(policy)([5, 6])
    >>> out.answers, out.exits, out.cost
    (['odd', 'even'], array([0, 1]), {'cost': 12.0})
    """

    def __init__(
        self,
        models: Sequence[Any] | Mapping[str, Any],
        *,
        scores: str | Iterable[str] = "confidence",
    ) -> None:
        named = models.items() if isinstance(models, Mapping) else ((None, m) for m in models)
        self.models: list[Model] = [model_of(model, name) for name, model in named]
        self._given = list(models.values()) if isinstance(models, Mapping) else list(models)
        self.names = list(models) if isinstance(models, Mapping) else _names(self.models)
        self.router = self.models[0] if isinstance(self.models[0], Router) else None
        others = self.models if self.router is None else self.models[1:]
        if len(others) < 2:
            raise ValueError(f"`models` must be at least 2, but got {len(others)}.")
        if any(isinstance(model, Router) for model in others):
            raise ValueError("`models` may have one Router, before all others.")
        warn_of_prices(self.models)
        self.scores = [scores] if isinstance(scores, str) else list(scores)
        if not self.scores:
            raise ValueError("`scores` must name at least one confidence.")

    def __repr__(self) -> str:
        """Return a one-line summary."""
        return f"Cascade({' -> '.join(self.names)}, scores={self.scores})"

    @property
    def fingerprint(self) -> str | None:
        """What policies are bound to; None if some model's identity is not known."""
        return identity_digest([model.identity() for model in self.models])

    def staged(self) -> "StagedCascade":
        """Return torch modules as a staged model, for `swiftsure.torch.EarlyExit` and `collect`."""
        from swiftsure.torch import Cascade as StagedCascade

        if not all(isinstance(model, TorchModel) for model in self.models):
            raise TypeError("`models` must all be torch modules to be one staged model.")
        return StagedCascade(self._given)

    def collect(
        self,
        inputs: Any,
        labels: Sequence[Any] | NDArray[Any] | None = None,
        *,
        losses: Any = None,
        folder: str | os.PathLike[str] | None = None,
        ids: ArrayLike | None = None,
        concurrency: int = 8,
        backoff: Backoff | None = None,
        progress: bool | None = None,
    ) -> ExitRecord:
        """Ask every model about every input, and return the record to calibrate on.

        Parameters
        ----------
        inputs : sequence, array or data frame
        labels : (n,), optional
            The right answers; None for one that is missing. Without labels, the risk is
            disagreement with the last model (`risk="consistency"`).
        losses : str or several, optional
            Names among `swiftsure.losses.LOSSES` ("zero_one", "brier"; for texts "exact_match",
            "choice", "token_f1", "rouge_l", "bleu"), an `AnswerLoss`, a `Judge`, or a function
            (answer, label) -> loss in [0, 1]. By default 0-1 for classes, and exact match for
            texts.
        folder : path, optional
            Where each answer is kept as it arrives; the same call resumes from there, and pays for
            no answer twice. Several cascades may share it.
        ids : (n,), optional
            As in `ExitRecord`; say of the record if inputs were drawn in groups or have slices.
        concurrency : int
            How many calls are under way at once. Plain functions run in threads.
        backoff : Backoff, optional
            Retries after rate limits, time-outs and errors of the server.
        progress : bool, optional
            Show a progress bar; by default if standard error is a terminal.

        Returns
        -------
        record : ExitRecord
            Costs are those that the answers state, and the seconds of each call. `full_costs` are
            those of the last model alone, which savings are measured against.

        Raises
        ------
        CollectionError
            If a model fails even after retries; answers that arrived are kept.
        """
        return run_coroutine(
            self.acollect(
                inputs,
                labels,
                losses=losses,
                folder=folder,
                ids=ids,
                concurrency=concurrency,
                backoff=backoff,
                progress=progress,
            )
        )

    async def acollect(
        self,
        inputs: Any,
        labels: Sequence[Any] | NDArray[Any] | None = None,
        *,
        losses: Any = None,
        folder: str | os.PathLike[str] | None = None,
        ids: ArrayLike | None = None,
        concurrency: int = 8,
        backoff: Backoff | None = None,
        progress: bool | None = None,
    ) -> ExitRecord:
        """Await the same as `collect`."""
        values = inputs if hasattr(inputs, "shape") else list(inputs)
        known = None if labels is None else list(labels)
        if len(values) == 0:
            raise ValueError("`inputs` must not be empty.")
        if known is not None and len(known) != len(values):
            raise ValueError(
                f"`labels` must be one per input, {len(values):,}, but got {len(known):,}."
            )
        listed = None if ids is None else np.asarray(ids).tolist()
        own = input_keys(values, listed)
        keys = [[AnswerKey(model_key(m), *each) for each in own] for m in self.models]
        if len({row[0].model for row in keys}) < len(keys):
            raise ValueError("`models` must have different names where they have no fingerprint.")
        options: dict[str, Any] = {
            "folder": folder,
            "concurrency": concurrency,
            "backoff": backoff or Backoff(),
            "progress": progress,
        }
        judges = [each for each in _listed(losses) if isinstance(each, Judge)]
        try:
            found = await ask_all(self.models, values, keys, **options)
            routes = None if self.router is None else found.pop(0)
            answers = [[answer for answer, _ in row] for row in found]
            graded = {
                judge.name: await _grades(judge, values, answers, known, options)
                for judge in judges
            }
        finally:
            for model in (*self.models, *(judge.grader() for judge in judges)):
                await model.close()
        record = record_of_answers(
            answers,
            known,
            graded=graded,
            seconds=np.asarray([[seconds for _, seconds in row] for row in found]).T,
            losses=losses,
            scores=self.scores,
            names=self.names if routes is None else self.names[1:],
            ids=ids,
            fingerprint=self.fingerprint,
            inputs=values,
        )
        for model in self.models:
            for what, pilot in model.pilots.items():
                if what != "router":
                    pilot.refuse(record, what)
                    record = replace(record, settings=learned_on(record.settings, what, pilot))
        return record if routes is None else self._routed(record, routes)

    def _routed(self, record: ExitRecord, routes: Sequence[tuple[Answer, float]]) -> ExitRecord:
        """Return the record with what the router said, and took."""
        cost = {} if self.router is None else dict(self.router.cost)
        return record.routed(
            [answer.confidence for answer, _ in routes],  # type: ignore[arg-type]
            cost={SECONDS: [seconds for _, seconds in routes], **cost},
            pilot=None if self.router is None else self.router.pilot,
        )

    def learn(
        self,
        inputs: Any,
        *,
        features: Sequence[str] = DEFAULT_ANSWER_FEATURES,
        loss: Any = None,
        ids: ArrayLike | None = None,
        folder: str | os.PathLike[str] | None = None,
        concurrency: int = 8,
        backoff: Backoff | None = None,
        progress: bool | None = None,
    ) -> "Cascade":
        """Return the cascade with confidences learned from questions and answers, without labels.

        Each model before the last gets a `LearnedConfidence`: a logistic regression on features of
        the question and its answer, fitted to how often it agrees with the last model.

        **Guarantee**: the inputs must not be among those that calibrate, which certificates state.
        Ids are compared; without ids nothing recognises them.

        Parameters
        ----------
        inputs : sequence
            Some hundred questions that will not calibrate.
        features : sequence of str
            Among `swiftsure.cascade.ANSWER_FEATURES`.
        loss : str or AnswerLoss, optional
            What disagreement with the last model is; by default as in `collect`.
        ids, folder, concurrency, backoff, progress
            As in `collect`.

        Examples
        --------
        >>> def small(question):
        ...     return Answer("I don't know." if question % 3 else "odd")
        >>> large = lambda question: Answer("odd")
        >>> cascade = Cascade({"small": small, "large": large}).learn(range(90), ids=range(90))
        >>> cascade.run(None).models[0].score.features[:2]
        ('question_length', 'answer_length')
        """
        if self.router is not None:
            raise ValueError("`learn` confidences first, and fit the router after it.")
        values = inputs if hasattr(inputs, "shape") else list(inputs)
        listed = None if ids is None else np.asarray(ids).tolist()
        own = input_keys(values, listed)
        keys = [[AnswerKey(model_key(m), *each) for each in own] for m in self.models]
        options: dict[str, Any] = {"folder": folder, "concurrency": concurrency}
        options |= {"backoff": backoff or Backoff(), "progress": progress}

        async def ask() -> list[list[Answer]]:
            try:
                found = await ask_all(self.models, values, keys, **options)
            finally:
                for model in self.models:
                    await model.close()
            return [[answer for answer, _ in row] for row in found]

        answers = run_coroutine(ask())
        (chosen, *_) = chosen_losses(loss, answers)
        apart = answer_tables(chosen, answers, None)[1] / chosen.range.high
        models: dict[str, Any] = {}
        each = [rows_of(values, [i])[0] for i in range(len(values))]
        for k, (name, model) in enumerate(zip(self.names[:-1], self.models[:-1], strict=True)):
            table = [
                [feature_values(features, v, a)] for v, a in zip(each, answers[k], strict=True)
            ]
            score = LearnedScore.fit_features(table, 1 - apart[:, [k]], features, ids=ids)
            models[name] = LearnedConfidence(model, score)
        return Cascade({**models, self.names[-1]: self.models[-1]}, scores=self.scores)

    def calibrate(
        self,
        record: ExitRecord,
        loss: str
        | Promise
        | CostPromise
        | Sequence[Promise | CostPromise]
        | Calibration
        | None = None,
        *,
        epsilon: float | None = None,
        risk: str | None = None,
        delta: float = DELTA,
        control: str | Control = "ucb",
        path: PathLike | PilotPath = None,
        missing: Missing = "raise",
        cost: str | None = None,
    ) -> Policy:
        """Find the cheapest certified setting; see `swiftsure.calibrate`.

        If that costs more than the last model alone, the policy is the last model alone, and says
        so with the numbers.

        Parameters
        ----------
        record : ExitRecord
        loss : str, Promise, CostPromise, several promises, or a Calibration
            As in `swiftsure.calibrate`. A Calibration takes the place of everything here, except
            that the cascade's first confidence decides if its rule names none.
        epsilon, risk, delta, control, path, missing
            As in `swiftsure.calibrate`. With a router, the default path is `Path.learn(0.25)`: a
            quarter of the samples finds the settings of both dials, and the others certify them.
        cost : str, optional
            The cost to compare; by default the price, the first of `full_costs` besides seconds.
        """
        if SECONDS in record.costs and isinstance(record, ExitRecord):
            # What is slower than nearly all answers hangs, for those who run the policy.
            slow = np.quantile(_seconds_alone(record), 0.99, axis=0).tolist()
            record = replace(record, settings={**record.settings, SECONDS: slow})
        if path is None and not isinstance(loss, Calibration) and ROUTER in record.settings:
            path = PilotPath(ROUTER_PILOT)
        if isinstance(loss, Calibration):
            others = (epsilon, risk, delta, control, path, missing, cost)
            if others != (None, None, DELTA, "ucb", None, "raise", None):
                raise ValueError("A Calibration says all of it: leave the other arguments out.")
            request = loss
        else:
            request = Calibration(
                stated_promises(loss, epsilon, risk),
                delta=delta,
                control=control,  # type: ignore[arg-type]
                path=path,  # type: ignore[arg-type]
                missing=missing,
                cost=cost,
            )
        if request.rule.score is None and self.scores[0] in record.confidences:
            request = replace(request, rule=replace(request.rule, score=self.scores[0]))
        policy: Any = request.run(record)
        found: Policy = policy
        return found

    def run(
        self,
        policy: Policy | SlicedPolicy | None,
        *,
        concurrency: int = 8,
        backoff: Backoff | None = None,
        early_backoff: Backoff | None = None,
    ) -> CascadeRunner:
        """Return the cascade that runs under a policy; call it with inputs.

        Parameters
        ----------
        policy : Policy or SlicedPolicy
            Refused if it was made for other models, as far as their fingerprints are known.
            None always asks the last model.
        concurrency, backoff, early_backoff
            As in `CascadeRunner`.
        """
        each = policy.policies.values() if isinstance(policy, SlicedPolicy) else [policy]
        score, *_ = [self._checked_score(own) for own in each]  # those of slices have one
        return CascadeRunner(
            self.models,
            policy,
            score,
            concurrency=concurrency,
            backoff=backoff,
            early_backoff=early_backoff,
        )

    def _checked_score(self, policy: Policy | None) -> str:
        """Return the confidence by which a policy decides, after checking that it fits."""
        if policy is None:
            return self.scores[0]
        binding = PolicyBinding(policy, SYSTEM_NAME, RECORD_FROM)
        binding.exit_thresholds(len(self.models))
        if policy.certificate.provenance.model is not None:
            binding.check_model(lambda: self.fingerprint or "models without a fingerprint")
        score = str(policy.score)
        if score not in ANSWER_SCORES and score not in self.scores:
            raise ValueError(
                f"`policy` decides by the confidence {score!r}, which this cascade does not have:"
                f" {', '.join(self.scores)}."
            )
        return score


def record_of_answers(
    answers: Sequence[Sequence[Answer]],
    labels: Sequence[Any] | None,
    *,
    seconds: NDArray[np.float64] | None = None,
    losses: Any = None,
    scores: Sequence[str] = ("confidence",),
    names: Sequence[str] | None = None,
    graded: Mapping[str, tuple[Any, Any]] | None = None,
    ids: ArrayLike | None = None,
    fingerprint: str | None = None,
    inputs: Any = None,
) -> ExitRecord:
    """Return the record of answers that are given already, by model: (n_models, n).

    Parameters are those of `Cascade.collect`; `seconds` is (n, n_models), and `graded` holds losses
    that are known already, in [0, 1]: against labels, or None, and against the last model, or None.
    Of `inputs` that are requests, what they are like is kept in the record's settings.
    """
    names = list(names or (f"model {k + 1}" for k in range(len(answers))))
    tables: dict[str, Any] = {"losses": {}, "inconsistencies": {}, "loss_ranges": {}}
    for name, (against, aside) in (graded or {}).items():
        if against is not None:
            tables["losses"][name] = against
            tables["loss_ranges"][name] = LossRange(0, 1)
        if aside is not None:
            tables["inconsistencies"][name] = aside
            tables["loss_ranges"][name] = LossRange(0, 1)
    if graded:
        losses = [each for each in _listed(losses) if not isinstance(each, Judge)]
    for loss in chosen_losses(losses, answers):
        against, aside = answer_tables(loss, answers, labels)
        tables["inconsistencies"][loss.name] = aside
        tables["loss_ranges"][loss.name] = loss.range
        missing = against is not None and np.isnan(against).any()
        if against is not None and (not missing or gap_is_known_by_agreement(loss.name)):
            tables["losses"][loss.name] = against
    own = _costs(answers, names)
    if seconds is not None:
        own.setdefault(SECONDS, seconds)
    features = features_of_inputs(inputs)
    return ExitRecord(
        {score: _confidences(answers, score, names) for score in scores},
        losses=tables["losses"],
        inconsistencies=tables["inconsistencies"],
        loss_ranges={k: v for k, v in tables["loss_ranges"].items() if k in tables["losses"]},
        inconsistency_ranges=tables["loss_ranges"],
        costs={name: np.cumsum(each, axis=1) for name, each in own.items()},
        full_costs={name: each[:, -1] for name, each in own.items() if each[:, -1].any()},
        ids=ids,  # type: ignore[arg-type]
        fingerprint=fingerprint,
        settings={
            **_versions(answers, names),
            **({} if features is None else {REQUESTS: features}),
        },
    )


def _seconds_alone(record: ExitRecord) -> NDArray[np.float64]:
    """Return the seconds of each model's answers alone, (n, n_models)."""
    total = np.atleast_2d(record.costs[SECONDS])
    if ROUTER not in record.settings:
        return np.asarray(np.diff(total, axis=-1, prepend=0.0))
    router = (total[:, 0] - np.asarray(record.full_costs[SECONDS]))[:, None]
    return np.hstack([router, np.diff(total[:, 1:], axis=-1, prepend=router)])


def _listed(losses: Any) -> list[Any]:
    if losses is None:
        return []
    return list(losses) if isinstance(losses, list | tuple | set) else [losses]


async def _grades(
    judge: Judge,
    inputs: Any,
    answers: Sequence[Sequence[Answer]],
    labels: Sequence[Any] | None,
    options: Mapping[str, Any],
) -> tuple[Any, Any]:
    """Return a judge's losses, against labels if there are any, else against the last model."""
    grader = judge.grader()
    targets = [each.answer for each in answers[-1]] if labels is None else labels
    rows = answers[:-1] if labels is None else answers  # the last model agrees with itself
    asked = [
        [
            judge.question(rows_of(inputs, [i])[0], row[i].answer, targets[i])
            for i in range(len(targets))
        ]
        for row in rows
    ]
    flat = [question for row in asked for question in row]
    digests = [digest for digest, _ in input_keys(flat, None)]
    # Equal questions are asked once, so that equal answers get equal grades.
    unique = dict(zip(digests, flat, strict=True))
    keys = [[AnswerKey(model_key(grader), digest) for digest in unique]]
    asked_once = list(unique.values())
    (found,) = await ask_all([grader], asked_once, keys, **{**options, "title": "judging"})
    known = {digest: judge.loss(each) for digest, (each, _) in zip(unique, found, strict=True)}
    graded = np.asarray([known[digest] for digest in digests]).reshape(len(rows), -1).T
    if labels is not None:
        return judge_tables(graded.tolist()), None
    return None, judge_tables(np.column_stack([graded, np.zeros(len(graded))]).tolist())


def _confidences(
    answers: Sequence[Sequence[Answer]], score: str, names: Sequence[str]
) -> NDArray[np.float32]:
    columns = []
    for row, name in zip(answers[:-1], names, strict=False):
        values = [answer_confidence(answer, score) for answer in row]
        if None in values:
            raise ValueError(
                f"`scores`: {name} gave no confidence {score!r} for input {values.index(None)}. A"
                " function returns Answer(answer, confidence=…); an endpoint needs"
                " log-probabilities, or a wrapper such as SelfConsistency or Verified."
            )
        columns.append(values)
    return np.asarray(columns, np.float32).T


def _costs(
    answers: Sequence[Sequence[Answer]], names: Sequence[str]
) -> dict[str, NDArray[np.float64]]:
    """Return the costs of each model's answers alone, (n, n_models), by unit."""
    units = dict.fromkeys(unit for row in answers for answer in row for unit in answer.cost)
    found = {}
    for unit in units:
        for row, name in zip(answers, names, strict=True):
            lacking = next((i for i, each in enumerate(row) if unit not in each.cost), None)
            if lacking is not None:
                raise ValueError(
                    f"`cost` must be in the same units for all models, but {name} gave none in"
                    f" {unit} for input {lacking} (0 if it costs nothing)."
                )
        found[unit] = np.asarray([[answer.cost[unit] for answer in row] for row in answers]).T
    return found


def _versions(
    answers: Sequence[Sequence[Answer]], names: Sequence[str]
) -> dict[str, dict[str, list[str]]]:
    """Return the versions as which models answered, where they said so, as a record's setting."""
    found = {
        name: sorted({each.version for each in row if each.version is not None})
        for name, row in zip(names, answers, strict=True)
    }
    known = {name: versions for name, versions in found.items() if versions}
    return {VERSIONS: known} if known else {}


def _names(models: Sequence[Model]) -> list[str]:
    """Return the names of models, numbered where they would be equal."""
    names = [model.name for model in models]
    for k, model in enumerate(models):
        if names.count(model.name) > 1:
            names[k] = f"{model.name} {k + 1}"
            model.name = names[k]
    return names
