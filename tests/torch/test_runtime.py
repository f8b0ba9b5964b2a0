"""EarlyExit: samples leave where the rule says, and what they do not need is not run."""

import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

import swiftsure as ss
from swiftsure.torch import EarlyExit, Scored, Staged, Stream, collect, fingerprint
from swiftsure.torch.cutting import cut
from tests.torch.builders import (
    SCORES,
    OwnConfidence,
    Played,
    completed,
    every_output,
    expected_exits,
    full_confidences,
    inputs,
    labels,
    logits,
    middle_threshold,
    network,
    policy_of,
    refused,
    rows,
    rules,
    split,
)

# --------------------------------------------------------------------------------- the exit rule


@st.composite
def played_cases(draw):
    """Logits, some so large that confidences reach 1.0 exactly, and a policy for them."""
    n, n_exits = draw(st.integers(0, 12)), draw(st.integers(2, 5))
    scale = draw(st.sampled_from([1.0, 5.0, 300.0]))
    batch = logits(n, n_exits, 3, seed=draw(st.integers(0, 10_000)), scale=scale)
    score = draw(st.sampled_from(SCORES))
    confidences = np.zeros((0, n_exits - 1), np.float32)
    if n:
        confidences = full_confidences(Played(n_exits), batch, score)
    policy = policy_of(n_exits=n_exits, score=score, **draw(rules(confidences)))
    return batch, confidences, policy


@settings(max_examples=250)
@given(played_cases())
def test_samples_leave_where_the_rule_says(case):
    batch, confidences, policy = case
    exits = expected_exits(policy, confidences)
    out = EarlyExit(Played(policy.n_exits), policy)(batch)
    assert out.exits.tolist() == exits
    assert torch.equal(out.outputs, rows(batch, exits))
    looked_at = ~np.isnan(out.confidences.numpy())
    assert np.array_equal(out.confidences.numpy()[looked_at], confidences[looked_at])


def may_fire(policy, k):
    level = np.inf if policy.threshold is None else policy.thresholds[k]
    return k >= policy.min_exit and (level < 1 if policy.strict else level <= 1)


@settings(max_examples=250)
@given(played_cases().filter(lambda case: len(case[0])))
def test_nothing_runs_that_no_decision_needs(case):
    """A stage sees exactly the samples that are still there, a head only if it may let some go."""
    batch, confidences, policy = case
    model = Played(policy.n_exits)
    out = EarlyExit(model, policy)(batch)
    exits = np.asarray(expected_exits(policy, confidences))
    there = [np.flatnonzero(exits >= k).tolist() for k in range(policy.n_exits)]
    last = policy.n_exits - 1
    assert model.stages == [(k, who) for k, who in enumerate(there) if who]
    assert model.heads == [
        (k, who) for k, who in enumerate(there) if who and (k == last or may_fire(policy, k))
    ]
    looked_at = np.zeros(confidences.shape, bool)
    for k in range(last):
        looked_at[there[k], k] = may_fire(policy, k)
    assert np.array_equal(~np.isnan(out.confidences.numpy()), looked_at)


def test_a_confidence_of_exactly_one_reaches_a_threshold_of_one():
    batch = torch.tensor([[[200.0, 0.0], [0.0, 0.0]], [[3.0, 0.0], [0.0, 0.0]]])
    assert EarlyExit(Played(2), policy_of(1.0, 2))(batch).exits.tolist() == [0, 1]
    assert EarlyExit(Played(2), policy_of(1.0, 2, strict=True))(batch).exits.tolist() == [1, 1]
    assert EarlyExit(Played(2), policy_of(None, 2))(batch).exits.tolist() == [1, 1]


def test_thresholds_are_compared_in_float32():
    """0.7 in float32 is not 0.7 in float64: both sides must round alike."""
    model = OwnConfidence(2)
    batch = torch.tensor([[0.7, 0.0], [np.nextafter(np.float32(0.7), np.float32(0)), 0.0]])
    assert EarlyExit(model, policy_of(0.7, 2, "model"))(batch).exits.tolist() == [0, 1]
    strict = policy_of(float(batch[1, 0]), 2, "model", strict=True)
    assert EarlyExit(model, strict)(batch).exits.tolist() == [0, 1]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("seed", range(6))
def test_networks_leave_by_their_own_confidences(seed, score):
    rng = np.random.default_rng(seed)
    model = network(n_exits=int(rng.integers(2, 6)), seed=seed)
    batch = inputs(64, seed=seed)
    full = full_confidences(model, batch, score)
    outputs = every_output(model, batch)
    for _ in range(10):
        levels = tuple(rng.choice(full[:, k]).item() for k in range(full.shape[1]))
        threshold = levels if rng.random() < 0.5 else levels[0]
        strict, min_exit = bool(rng.random() < 0.5), int(rng.integers(0, model.n_exits))
        policy = policy_of(threshold, model.n_exits, score, strict=strict, min_exit=min_exit)
        out = EarlyExit(model, policy)(batch)
        seen = out.confidences.numpy()
        np.testing.assert_allclose(seen[~np.isnan(seen)], full[~np.isnan(seen)], atol=1e-5)
        assert out.exits.tolist() == expected_exits(policy, completed(out, full))
        torch.testing.assert_close(out.outputs, rows(outputs, out.exits), atol=1e-5, rtol=1e-4)
        assert torch.equal(out.predictions, out.outputs.argmax(dim=1))


@pytest.mark.parametrize("seed", range(8))
def test_batch_sizes_matter_only_next_to_a_threshold(seed):
    model = network(n_exits=4, width=64, seed=seed)
    batch = inputs(64, seed=seed)
    full = full_confidences(model, batch)
    threshold = float(np.quantile(full, 0.6))
    fast = EarlyExit(model, policy_of(threshold, 4))
    whole = fast(batch)
    assert len(whole.exits.unique()) > 2
    near = (np.abs(full - threshold) < 1e-5).any(axis=1)
    for size in (1, 7):
        parts = [fast(part) for part in split(batch, size)]
        exits = torch.cat([part.exits for part in parts])
        same = (exits == whole.exits).numpy()
        assert (same | near).all()
        outputs = torch.cat([part.outputs for part in parts])
        torch.testing.assert_close(outputs[same], whole.outputs[same], atol=1e-5, rtol=1e-4)


# ------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("threshold", [None, 0.0, 0.5, 1.0])
def test_empty_batches(threshold):
    out = EarlyExit(network(), policy_of(threshold, 4))(inputs(0))
    assert out.outputs.shape == (0, 5)
    assert out.exits.shape == (0,)
    assert out.exits.dtype == torch.long
    assert out.confidences.shape == (0, 3)


@pytest.mark.parametrize("exit_", range(4))
def test_single_samples(exit_):
    batch = logits(1, 4)
    batch[:, exit_:, 0] = 50.0
    model = Played(4)
    out = EarlyExit(model, policy_of(0.999, 4))(batch)
    assert out.exits.tolist() == [exit_]
    assert torch.equal(out.outputs, batch[:, exit_])
    assert [k for k, _ in model.stages] == list(range(exit_ + 1))


@pytest.mark.parametrize("threshold", [0.0, 0.5, None])
def test_what_is_given_is_ones_own(threshold):
    """A head may hand out the batch itself: neither may change with the other."""
    batch = logits(9)
    kept = batch.clone()
    out = EarlyExit(Played(4), policy_of(threshold, 4))(batch)
    expected = kept[torch.arange(9), out.exits]
    batch.zero_()
    assert torch.equal(out.outputs, expected)
    batch.copy_(kept)
    out.outputs.zero_()
    assert torch.equal(batch, kept)


class Prior(Staged):
    """The first head knows only a weight."""

    n_exits = 2

    def __init__(self):
        super().__init__()
        self.prior = nn.Parameter(torch.tensor([2.0, 1.0, 0.0]))
        self.eval()

    def begin(self, batch):
        return batch

    def advance(self, exit_index, state):
        return state

    def head(self, exit_index, state):
        return self.prior.expand(len(state), 3)


@pytest.mark.parametrize("threshold", [0.0, None])
def test_weights_are_not_given_away(threshold):
    model = Prior()
    out = EarlyExit(model, policy_of(threshold, 2))(torch.zeros(4, 1))
    out.outputs.zero_()
    assert model.prior.tolist() == [2.0, 1.0, 0.0]


def test_all_leave_at_once():
    model, batch = Played(4), logits(9)
    out = EarlyExit(model, policy_of(0.0, 4))(batch)
    assert out.exits.tolist() == [0] * 9
    assert torch.equal(out.outputs, batch[:, 0])
    assert [k for k, _ in model.stages] == [0]
    assert [k for k, _ in model.heads] == [0]


def test_none_leaves_early():
    model = Played(4)
    batch = logits(9)
    out = EarlyExit(model, policy_of(None, 4))(batch)
    assert out.exits.tolist() == [3] * 9
    assert torch.equal(out.outputs, batch[:, 3])
    assert out.confidences.isnan().all()
    assert [k for k, _ in model.heads] == [3]


class Nested(Staged):
    """A state of dicts, tuples and lists; outputs of dicts and tuples."""

    n_exits = 3

    def __init__(self):
        super().__init__()
        self.plain = network(n_exits=3)
        self.eval()

    def begin(self, batch):
        x, mask = batch["x"], batch["more"][0]
        return {"x": x, "more": ([x, mask], (mask, None)), "name": "kept"}

    def advance(self, exit_index, state):
        assert state["name"] == "kept"
        first, mask = state["more"][0]
        assert len(first) == len(mask) == len(state["x"])
        return {**state, "x": self.plain.advance(exit_index, state["x"]) * state["more"][1][0]}

    def head(self, exit_index, state):
        values = self.plain.head(exit_index, state["x"])
        (first, _), _ = state["more"]
        outputs = {"logits": values, "rest": (first[:, :1], (values > 0, values.argmax(dim=1)))}
        return Scored(outputs, values.softmax(dim=1).amax(dim=1))


def nested_batch(n=40):
    mask = 0.5 + torch.rand(n, 1, generator=torch.Generator().manual_seed(1))
    return {"x": inputs(n), "more": (mask, [])}


def test_nested_states_and_outputs():
    model, batch = Nested(), nested_batch()
    full = full_confidences(model, {"inputs": batch}, "model", losses=[exit_agreement()])
    policy = policy_of(float(np.median(full)), 3, "model")
    out = EarlyExit(model, policy)(batch)
    assert len(out.exits.unique()) == 3
    assert out.exits.tolist() == expected_exits(policy, completed(out, full))
    every = model(batch)
    for sample, exit_ in enumerate(out.exits.tolist()):
        expected = every[exit_]
        torch.testing.assert_close(out.outputs["logits"][sample], expected["logits"][sample])
        kept, (sign, best) = out.outputs["rest"]
        assert kept[sample] == batch["x"][sample, 0]
        assert torch.equal(sign[sample], expected["rest"][1][0][sample])
        assert best[sample] == expected["rest"][1][1][sample]
    with pytest.raises(ValueError, match="predictions"):
        _ = out.predictions


class Boxes(NamedTuple):
    corners: torch.Tensor
    more: tuple | None


@pytest.mark.parametrize(
    "form",
    [
        lambda x: [x, (x[:, 0], {"a": x.long()})],
        lambda x: {"logits": x, "attention": None},
        lambda x: Boxes(x, None),
        lambda x: OrderedDict(first=x, second=Boxes(x > 0, (x[:, :, None],))),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_outputs_of_any_nesting(form, streamed):
    """Each sample gets what its exit's head gave, in the form in which it gave it."""
    batch = logits(40, 2)
    fast = leaving_differently(form, form)
    out = fast(batch)
    if streamed:
        (out,) = Stream(fast, batch_size=7).run([batch], ordered=True)
    assert out.exits.bincount().min() > 0
    expected = form(rows(batch, out.exits))
    found, structure = pytree.tree_flatten(out.outputs)
    leaves, wanted = pytree.tree_flatten(expected)
    assert structure == wanted
    for one, two in zip(found, leaves, strict=True):
        assert one is None if two is None else torch.equal(one, two)


def exit_agreement():
    """A loss of nested outputs, which the usual ones are not for."""
    from swiftsure.losses import Loss, LossRange, TensorFunctions

    def against_last(outputs):
        best = [output["rest"][1][1] for output in outputs]
        return torch.stack([each != best[-1] for each in best], dim=1).double()

    functions = TensorFunctions(against_last=against_last)
    return Loss("agreement", LossRange(0, 1, whole=True), "prediction", tensors=functions)


@pytest.mark.parametrize("size", [None, 4])
def test_many_batches(size):
    """Results come in order, a batch each, as soon as each is asked for."""
    batch = logits(40)
    fast = EarlyExit(Played(4), policy_of(0.7, 4))
    expected = fast(batch)
    pushed = []

    def batches():
        for part in batch.split([16, 1, 0, 23]):
            pushed.append(len(part))
            yield part

    results = fast.run(batches(), batch_size=size)
    first = next(results)
    assert pushed == [16]
    results = [first, *results]
    assert [len(result.exits) for result in results] == [16, 1, 0, 23]
    assert torch.equal(torch.cat([result.exits for result in results]), expected.exits)
    assert torch.equal(torch.cat([result.outputs for result in results]), expected.outputs)
    assert list(fast.run([])) == []


# ------------------------------------------------------------------------------- dtypes and modes


class Probed(Staged):
    """Notes under which autocast, and whether with gradients, each stage ran."""

    n_exits = 3

    def __init__(self):
        super().__init__()
        self.plain = network(n_exits=3)
        self.seen = set()
        self.eval()

    def advance(self, exit_index, state):
        enabled = torch.is_autocast_enabled("cpu")
        kind = torch.get_autocast_dtype("cpu") if enabled else None
        self.seen.add((kind, torch.is_inference_mode_enabled()))
        return self.plain.advance(exit_index, state)

    def head(self, exit_index, state):
        return self.plain.head(exit_index, state)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (None, None),
        ("float32", None),
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.filterwarnings("ignore:Autocast to")
def test_dtypes(dtype, kind, streamed):
    """The runtime computes in the dtype of collection, whatever stands around it."""
    model, batch = Probed(), inputs(64)
    record = collect(model, [(batch, labels(64))], dtype=dtype)
    assert record.dtype == dtype
    policy = ss.calibrate(record, loss="zero_one", control="empirical", epsilon=0.3)
    assert policy.dtype == dtype
    policy = policy.model_copy(update={"threshold": float(np.median(record.confidences["top1"]))})
    assert model.seen >= {(kind, True)}
    model.seen.clear()
    fast = EarlyExit(model, policy)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if streamed:
            (out,) = Stream(fast, batch_size=64).run([batch], ordered=True)
        else:
            out = fast(batch)
            full = record.confidences["top1"]
            assert out.exits.tolist() == expected_exits(policy, completed(out, full))
    assert model.seen == {(kind, True)}
    assert out.outputs.dtype == (kind or torch.float32)
    assert len(out.exits.unique()) > 1
    reference = rows(every_output(model, batch), out.exits)
    loose = 1e-4 if kind is None else 0.1
    torch.testing.assert_close(out.outputs.float(), reference, atol=loose, rtol=loose)


def test_a_dtype_may_be_wished_where_the_policy_has_none():
    fast = EarlyExit(network(), policy_of(0.5, 4), dtype="bfloat16")
    assert fast(inputs(4)).outputs.dtype == torch.bfloat16


def test_other_dtypes_are_refused():
    model = network()
    for made_for, asked in [("bfloat16", "float16"), ("bfloat16", "float32")]:
        with pytest.raises(ValueError, match=f"made for dtype={made_for!r}, but got {asked!r}"):
            EarlyExit(model, policy_of(0.5, 4, dtype=made_for), dtype=asked)
    with refused("dtype"):
        EarlyExit(model, policy_of(0.5, 4), dtype="int8")


def test_a_model_certified_in_its_own_dtype_runs_in_no_other():
    model = network()
    policy = ss.calibrate(collect(model, [(inputs(50), labels(50))]), loss="zero_one", epsilon=0.05)
    assert policy.certificate.provenance.model is not None
    EarlyExit(model, policy, dtype="float32")  # the same thing
    with pytest.raises(ValueError, match="dtype"):
        EarlyExit(model, policy, dtype="bfloat16")


def test_outputs_of_differing_dtypes_lose_nothing():
    """The first who leaves must not set the precision of those who stay."""

    class Mixed(Played):
        def head(self, exit_index, state):
            output = super().head(exit_index, state)
            return output.bfloat16() if exit_index == 0 else output

    batch = logits(8, 2)
    out = EarlyExit(Mixed(2), policy_of(0.7, 2))(batch)
    assert out.exits.bincount().min() > 0
    last = out.exits == 1
    assert torch.equal(out.outputs[last].float(), batch[last, 1])


def test_under_an_outer_inference_mode():
    model, batch = network(), inputs(32)
    fast = EarlyExit(model, policy_of(middle_threshold(model, batch), 4))
    outside = fast(batch)
    with torch.inference_mode():
        inside = fast(batch.clone())
    assert torch.equal(inside.exits, outside.exits)
    assert torch.equal(inside.outputs, outside.outputs)


def test_no_gradients_are_kept():
    model, batch = network(), inputs(8).requires_grad_()
    out = EarlyExit(model, policy_of(0.5, 4))(batch)
    assert not out.outputs.requires_grad
    assert not torch.is_inference_mode_enabled()


def test_threads():
    model = network(width=32)
    batches = [inputs(33, seed=seed) for seed in range(24)]
    fast = EarlyExit(model, policy_of(middle_threshold(model, batches[0]), 4))
    alone = [fast(batch) for batch in batches]
    start = threading.Barrier(4)

    def run(worker):
        start.wait()
        return [fast(batch) for batch in batches[worker::4]]

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(run, range(4)))
    for worker in range(4):
        for one, two in zip(together[worker], alone[worker::4], strict=True):
            assert torch.equal(one.exits, two.exits)
            torch.testing.assert_close(one.outputs, two.outputs)


def test_the_batch_is_left_as_it_was():
    batch = logits(10)
    before = batch.clone()
    EarlyExit(Played(4), policy_of(0.6, 4))(batch)
    assert torch.equal(batch, before)


# ----------------------------------------------------------------------------------- own scores


def test_the_models_own_confidence_decides():
    confidences = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.8, 0.0], [0.2, 0.1, 0.9]])
    model = OwnConfidence(3)
    out = EarlyExit(model, policy_of(0.8, 3, "model"))(confidences)
    assert out.exits.tolist() == [0, 1, 2]
    assert torch.equal(out.outputs["exit"], confidences)


def test_a_scored_head_may_be_judged_by_its_logits():
    class Both(Played):
        def head(self, exit_index, state):
            output = super().head(exit_index, state)
            return Scored(output, torch.full((len(output),), 0.5))

    batch = logits(20)
    for policy in (policy_of(0.6, 4), policy_of(0.6, 4, "entropy")):
        expected = EarlyExit(Played(4), policy)(batch)
        out = EarlyExit(Both(4), policy)(batch)
        assert torch.equal(out.exits, expected.exits)
        assert torch.equal(out.outputs, expected.outputs)
    own = EarlyExit(Both(4), policy_of(0.5, 4, "model"))(batch)
    assert own.exits.tolist() == [0] * 20


def test_heads_without_a_confidence_have_no_model_score():
    with pytest.raises(ValueError, match="Scored"):
        EarlyExit(network(), policy_of(0.5, 4, "model"))(inputs(3))


def test_scores_of_classes_need_classes():
    class Image(Played):
        def head(self, exit_index, state):
            return super().head(exit_index, state)[:, :, None]

    with pytest.raises(ValueError, match=r"\(n, n_classes\), but got \(3, 5, 1\)"):
        EarlyExit(Image(4), policy_of(0.5, 4))(logits(3))


# ------------------------------------------------------------------------------------ refusals


def test_other_scores_are_refused():
    assert EarlyExit(network(), policy_of(0.5, 4), score="top1").score == "top1"
    with pytest.raises(ValueError, match="made for score='top1', but got 'entropy'"):
        EarlyExit(network(), policy_of(0.5, 4), score="entropy")


def test_scores_that_no_tensor_has_are_refused():
    """As when confidences of one's own were passed as arrays."""
    with refused("policy.score"):
        EarlyExit(network(), policy_of(0.5, 4, "mine"))


@pytest.mark.parametrize("n_exits", [2, 3, 5])
def test_other_numbers_of_exits_are_refused(n_exits):
    with pytest.raises(ValueError, match=f"made for {n_exits} exits, but the model has 4"):
        EarlyExit(network(), policy_of(0.5, n_exits))


def test_policies_of_whole_runs_are_refused():
    losses = np.zeros((50, 3))
    record = ss.ThresholdRecord([1.0, 0.5, 0.2], losses={"rouge_l": losses})
    for source in (record, record.curve("gap", "rouge_l")):
        with pytest.raises(ValueError, match="not made for exits of a network"):
            EarlyExit(network(), ss.calibrate(source, epsilon=0.5))


def test_other_weights_are_refused(tmp_path):
    model = network()
    policy = ss.calibrate(collect(model, [(inputs(50), labels(50))]), loss="zero_one", epsilon=0.05)
    policy.save(tmp_path / "policy.json")
    policy = ss.Policy.load(tmp_path / "policy.json")
    assert policy.certificate.provenance.model == fingerprint(model)
    EarlyExit(model, policy)
    with torch.no_grad():
        model.heads[2].bias[1] += 1e-6
    with pytest.raises(ValueError, match="another model, other weights or another configuration"):
        EarlyExit(model, policy)


def test_a_bound_policy_needs_a_module():
    class Plain:
        n_exits = 2

        def begin(self, batch):
            return batch

        def advance(self, exit_index, state):
            return state

        def head(self, exit_index, state):
            return state

        def select(self, state, index):
            return state[index]

    out = EarlyExit(Plain(), policy_of(0.9, 2))(torch.tensor([[9.0, 0.0], [0.0, 0.0]]))
    assert out.exits.tolist() == [0, 1]
    with refused("model"):
        EarlyExit(Plain(), policy_of(0.9, 2, model="sha256:0"))


def test_training_mode_is_refused():
    model = network()
    with refused("model"):
        EarlyExit(model.train(), policy_of(0.5, 4))
    fast = EarlyExit(model.eval(), policy_of(0.5, 4))
    fast(inputs(3))
    fast.train()
    with refused("model"):
        fast(inputs(3))
    fast.eval()
    fast(inputs(3))


def test_a_part_in_training_mode_is_refused():
    """As when the network that a cut model shares its layers with is trained further."""
    plain = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
    model = cut(plain, ["0"], [nn.Linear(8, 5)]).eval()
    fast = EarlyExit(model, policy_of(0.5, 2))
    before = plain[1].running_mean.clone()
    plain.train()
    with refused("model"):
        fast(inputs(8))
    assert torch.equal(plain[1].running_mean, before)


def test_models_without_exits_are_refused():
    with pytest.raises(TypeError, match=r"`model` must have a method `begin`, but Linear has none"):
        EarlyExit(nn.Linear(6, 5), policy_of(0.5, 2))


@pytest.mark.parametrize("streamed", [False, True])
def test_batches_on_another_device_are_refused(streamed):
    fast = EarlyExit(network(), policy_of(0.5, 4))
    batch = {"x": inputs(3).to("meta")}
    with pytest.raises(ValueError, match="`batch` is on meta, but the model is on cpu"):
        Stream(fast, batch_size=4).push(batch) if streamed else fast(batch)


def test_models_on_several_devices_take_batches_of_any_of_them():
    model = network()
    model.heads[3].to("meta")
    fast = EarlyExit(model, policy_of(0.0, 4))
    fast(inputs(3))
    model.heads[3].to_empty(device="cpu")
    model.stages[0].to("meta")
    with fast.context(inputs(3)):  # stage 1 is elsewhere, but the batch is where a part is
        pass


@pytest.mark.parametrize("batch", [[], {"x": "text"}, None])
def test_batches_without_tensors_are_refused(batch):
    with refused("batch"):
        EarlyExit(network(), policy_of(0.5, 4))(batch)


# ------------------------------------------------------------------------------- broken outputs


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_confidence_that_is_nan_never_exits(score, value):
    batch = logits(8, scale=0.1)
    batch[5, :3, 1:3] = value
    out = EarlyExit(Played(4), policy_of(0.0, 4, score))(batch)
    assert out.exits.tolist() == [3 if row == 5 else 0 for row in range(8)]
    assert torch.equal(out.outputs[5], batch[5, 3])
    assert out.confidences[5].isnan().all()


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("threshold", [0.9, (None, 0.9, 0.9), None])
def test_nan_is_refused_by_name(threshold, score):
    batch = logits(8, scale=0.1)
    batch[5, :, 2] = torch.nan
    fast = EarlyExit(Played(4), policy_of(threshold, 4, score))
    with pytest.raises(ValueError, match=r"output of exit 4 is NaN .* sample 5"):
        fast(batch)


def test_nan_of_an_exit_that_is_not_asked_does_not_matter():
    batch = logits(8)
    batch[5, 1] = torch.nan
    out = EarlyExit(Played(4), policy_of((0.9, None, 0.9), 4))(batch)
    assert not out.outputs.isnan().any()


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("exit_", [0, 3])
@pytest.mark.parametrize(("classes", "value"), [(2, torch.inf), (slice(None), -torch.inf)])
def test_infinite_logits_are_refused_as_in_a_record(score, exit_, classes, value):
    """They make the softmax NaN, so the full model answers, whose logits must be finite."""
    batch = logits(8, scale=0.1)
    batch[5, exit_, classes] = value
    fast = EarlyExit(Played(4), policy_of(0.9, 4, score))
    if exit_ == 3:
        with pytest.raises(ValueError, match=r"output of exit 4 .* sample 5\b"):
            fast(batch)
    else:
        assert fast(batch).exits[5] == 3
    with pytest.raises(ValueError, match=rf"output of exit {exit_ + 1} .* sample 5\b"):
        collect(Played(4), [batch], scores=[score])
    with refused("logits"):
        ss.ExitRecord.from_logits(batch.double().numpy(), score=score)


@pytest.mark.parametrize("temperatures", [None, (2.0, 1.0, 0.5, 1.5)])
@pytest.mark.parametrize("score", SCORES)
def test_masked_classes_are_as_in_a_record(score, temperatures):
    """Logits of −inf are probabilities of 0: records, `collect` and the runtime agree."""
    batch, truth = logits(200), labels(200)
    batch[::2, :, 1] = -torch.inf
    batch[::3, 1:, 2:4] = -torch.inf
    scale = (1.0,) * 4 if temperatures is None else temperatures
    record = ss.ExitRecord.from_logits(
        batch.double().numpy(), truth.numpy(), score=score, temperatures=scale
    )
    collected = collect(Played(4), [(batch, truth)], scores=[score], temperatures=temperatures)
    assert np.array_equal(record.confidences[score], collected.confidences[score])
    for loss in ("zero_one", "brier"):
        np.testing.assert_allclose(record.losses[loss], collected.losses[loss], atol=1e-6)
        np.testing.assert_allclose(
            record.inconsistencies[loss], collected.inconsistencies[loss], atol=1e-6
        )
    policy = ss.calibrate(record, loss="zero_one", epsilon=0.5)
    assert policy.threshold is not None
    out = EarlyExit(Played(4), policy)(batch)
    assert out.exits.tolist() == expected_exits(policy, record.confidences[score])


def test_the_state_dict_is_that_of_the_model():
    model = network()
    fast = EarlyExit(model, policy_of(0.9, 4))
    assert list(fast.state_dict()) == [f"model.{name}" for name in model.state_dict()]
    assert [name for name, _ in fast.named_parameters()] == [
        f"model.{name}" for name, _ in model.named_parameters()
    ]


def test_a_models_own_confidence_that_is_no_number_never_exits():
    batch = torch.full((6, 3), 0.1)
    batch[4, 1] = torch.nan
    out = EarlyExit(OwnConfidence(3), policy_of((0.9, 0.05), 3, "model"))(batch)
    assert out.exits.tolist() == [1, 1, 1, 1, 2, 1]


def leaving_differently(*heads):
    """A model of two exits whose outputs are made by these functions."""

    class Differing(Played):
        def head(self, exit_index, state):
            output = super().head(exit_index, state)
            return Scored(heads[exit_index](output), output.softmax(dim=1).amax(dim=1))

    return EarlyExit(Differing(2), policy_of(0.7, 2, "model"))


@pytest.mark.parametrize(
    ("first", "second", "word"),
    [
        (lambda x: x, lambda x: x[:, :2], r"shape, but got \(2,\) after \(5,\)"),
        (lambda x: x, lambda x: x[:, :, None], "shape"),
        (lambda x: {"a": x, "b": x}, lambda x: {"a": x}, "structure"),
        (lambda x: x, lambda x: (x, x), "structure"),
        (lambda x: {"a": x}, lambda x: {"b": x}, "structure"),
    ],
)
def test_exits_whose_outputs_differ_in_kind(first, second, word):
    with pytest.raises(ValueError, match=f"Exits must return outputs of the same {word}"):
        leaving_differently(first, second)(logits(12, 2))


def test_outputs_without_a_row_a_sample():
    """A head that mixes up the batch must not have its rows spread over the samples."""
    fast = leaving_differently(lambda x: x, lambda x: x.mean(dim=0, keepdim=True))
    with pytest.raises(ValueError, match="output"):
        fast(logits(12, 2))


# --------------------------------------------------------------------------------- temperatures


def test_temperatures_scale_decisions_and_outputs():
    batch, temperatures = logits(40), (2.5, 1.0, 0.5, 3.0)
    scaled = batch / torch.tensor(temperatures)[:, None]
    record = ss.ExitRecord.from_logits(scaled.numpy(), labels(40).numpy())
    confidences = record.confidences["top1"]
    policy = policy_of(float(np.median(confidences)), 4, temperatures=temperatures)
    out = EarlyExit(Played(4), policy)(batch)
    assert len(out.exits.unique()) == 4
    assert out.exits.tolist() == expected_exits(policy, completed(out, confidences))
    torch.testing.assert_close(out.outputs, rows(scaled, out.exits))
    plain = EarlyExit(Played(4), policy_of(policy.threshold, 4))(batch)
    assert not torch.equal(out.exits, plain.exits)


def test_temperatures_are_as_calibrating_on_scaled_logits():
    batch, truth, temperatures = logits(400), labels(400), (2.5, 1.0, 0.5, 3.0)
    model = Played(4)
    record = replace(collect(model, [(batch, truth)], temperatures=temperatures), order=0)
    policy = ss.calibrate(record, risk="consistency", loss="brier", epsilon=0.3)
    assert policy.temperatures == temperatures
    scaled = batch / torch.tensor(temperatures)[:, None]
    bare = replace(collect(Played(4), [(scaled, truth)]), order=0)
    other = ss.calibrate(bare, risk="consistency", loss="brier", epsilon=0.3)
    assert not policy.runs_full_model
    assert policy.threshold == other.threshold
    one = EarlyExit(model, policy)(batch)
    two = EarlyExit(Played(4), other)(scaled)
    assert len(one.exits.unique()) > 1
    assert torch.equal(one.exits, two.exits)
    assert torch.equal(one.outputs, two.outputs)


def test_a_models_own_confidence_is_not_scaled():
    class Both(Played):
        def head(self, exit_index, state):
            output = super().head(exit_index, state)
            return Scored(output, output.softmax(dim=1).amax(dim=1))

    batch = logits(20, 2)
    plain = EarlyExit(Both(2), policy_of(0.7, 2, "model"))(batch)
    out = EarlyExit(Both(2), policy_of(0.7, 2, "model", temperatures=(4.0, 2.0)))(batch)
    assert torch.equal(out.exits, plain.exits)
    scale = torch.tensor([4.0, 2.0])[out.exits][:, None]
    assert torch.equal(out.outputs, plain.outputs / scale)


# ---------------------------------------------------------------------------------- compilation


@pytest.fixture
def compiled():
    """Compile with a backend that only counts graphs, one counter a stage."""
    import torch._dynamo
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counters = []
    real = torch.compile

    def counting(function, **options):
        counters.append(CompileCounter())
        return real(function, backend=counters[-1], **options)

    with mock.patch("torch.compile", counting):
        yield counters
    torch._dynamo.reset()


SIZES = (64, 1, 5, 0, 7, 33, 128, 2, 3, 1, 100)


@pytest.mark.slow
def test_compiled_stages_give_the_same(compiled):
    model = network(n_exits=5)
    policy = policy_of(middle_threshold(model, inputs(64)), 5)
    fast, plain = EarlyExit(model, policy, compile=True), EarlyExit(model, policy)
    for seed, n in enumerate(SIZES):
        batch = inputs(n, seed=seed)
        out, expected = fast(batch), plain(batch)
        assert torch.equal(out.exits, expected.exits)
        torch.testing.assert_close(out.outputs, expected.outputs)
    assert len(compiled) == 5


@pytest.mark.slow
def test_every_stage_is_compiled_for_any_batch_size(compiled):
    """At most three graphs a stage (none, one and several samples), and never a way back.

    However many stages there are: PyTorch gives up on code that needs more than eight graphs.
    """
    models = [network(n_exits=5), network(n_exits=5, seed=1), network(n_exits=12)]
    plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)).eval()
    models.append(cut(plain, ["1"], [nn.Linear(8, 5)]).eval())
    for model in models:
        compiled.clear()
        never = EarlyExit(model, policy_of(None, model.n_exits), compile=True)
        for seed, n in enumerate(SIZES):
            never(inputs(n, seed=seed))
        graphs = [counter.frame_count for counter in compiled]
        assert len(graphs) == model.n_exits
        assert all(1 <= count <= 3 for count in graphs), graphs
        compiled.clear()
        threshold = middle_threshold(model, inputs(64), share=0.2)
        fast = EarlyExit(model, policy_of(threshold, model.n_exits), compile=True)
        for seed in range(2):  # batches shrink on the way, to sizes of all kinds
            for n in SIZES:
                fast(inputs(n, seed=seed))
        assert all(1 <= counter.frame_count <= 3 for counter in compiled)


def test_results_may_enter_computations_with_gradients():
    model, batch = network(), inputs(8)
    scale = nn.Parameter(torch.ones(()))
    for threshold in (middle_threshold(model, batch), None, 0.0):
        fast = EarlyExit(model, policy_of(threshold=threshold, n_exits=model.n_exits))
        found = fast(batch)
        table = torch.stack([scale * output for output in model(batch)], dim=1)
        taken = table[torch.arange(8), found.exits]
        (taken * found.outputs).sum().backward()
        assert not any(t.is_inference() for t in (found.exits, found.confidences, found.decided))
    (left, *_) = Stream(fast, 8).push(batch)
    (scale * left.outputs).sum().backward()


def test_a_policy_of_a_curve_or_of_a_file_is_refused_with_the_way_out():
    model, batch = network(), inputs(64)
    record = collect(model, [(batch, labels(64))])
    policy = ss.calibrate(record.curve("gap", "zero_one"), epsilon=0.5)
    with pytest.raises(ValueError, match=r"calibrated from a curve, .* calibrate from the record"):
        EarlyExit(model, policy)
    with pytest.raises(TypeError, match=r"`policy` must be a Policy, but got str; Policy\.load"):
        EarlyExit(model, "policy.json")


@pytest.mark.parametrize("given", [{"losses": "brier"}, {"scores": "entropy"}])
def test_one_name_will_do_for_a_list_of_them(given):
    record = collect(network(), [(inputs(8), labels(8))], **given)
    assert [given.get("losses", "zero_one")] == list(record.losses)[:1]
    assert [given.get("scores", "top1")] == list(record.confidences)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_an_outer_autocast_of_another_dtype_warns_once(dtype, recwarn):
    model, x = network(), inputs(6)
    fast = EarlyExit(model, policy_of(0.5, 4, dtype=dtype))
    expected = fast(x).outputs
    assert not recwarn
    same, other = (torch.bfloat16, torch.float16) if dtype else (None, torch.bfloat16)
    if same is not None:
        with torch.autocast("cpu", dtype=same):
            fast(x)
        assert not recwarn
    with torch.autocast("cpu", dtype=other):
        with pytest.warns(UserWarning, match=f"is ignored: the policy was made for {dtype or 'f'}"):
            found = fast(x).outputs
        recwarn.clear()
        fast(x)
    assert not recwarn
    assert torch.equal(found, expected)


def test_weights_that_change_later_are_noticed():
    model = network()
    batch = inputs(8)
    policy = policy_of(0.7, 4, model=fingerprint(model))
    fast = EarlyExit(model, policy)
    fast(batch)
    parameter = next(model.parameters())
    with torch.no_grad():
        parameter.add_(0.5)
    with pytest.raises(ValueError, match="was made for another model"):
        fast(batch)
    with torch.no_grad():
        parameter.sub_(0.5)
    model.load_state_dict(network().state_dict())
    fast(batch)  # the same values again
    model.load_state_dict(network(seed=1).state_dict())
    with pytest.raises(ValueError, match="was made for another model"):
        fast(batch)
    with pytest.raises(ValueError, match="was made for another model"):
        Stream(fast, 4).push(batch)
    model.load_state_dict(network().state_dict())
    fast(batch)
    model.heads[0] = nn.Linear(16, 5)
    with pytest.raises(ValueError, match="was made for another model"):
        fast(batch)
