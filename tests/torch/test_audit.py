"""Audits: a fair share of requests, run in full, whatever way they went."""

import copy
import io
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, chi2_contingency

import swiftsure as ss
from swiftsure.losses import LOSSES
from swiftsure.monitor import Monitor, RequestOrder
from swiftsure.torch import Auditor, EarlyExit, Staged, Stream, collect
from swiftsure.torch.segmentation import image_losses
from tests.torch.builders import (
    Played,
    every_output,
    inputs,
    labels,
    logits,
    middle_threshold,
    network,
    policy_of,
    refused,
)


def consistency_monitor(loss="zero_one", epsilon=0.5, high=1.0):
    return Monitor(epsilon, 0.01, (0.0, high), risk="consistency", loss=loss)


def policy_for(monitor, threshold, n_exits, **fields):
    """A policy that promises what a monitor watches."""
    policy = policy_of(threshold, n_exits)
    update = {
        "risk": monitor.risk,
        "loss": monitor.loss,
        "epsilon": monitor.epsilon,
        "loss_range": (monitor.loss_range.low, monitor.loss_range.high),
    }
    promise = replace(policy.certificate.promises[0], **update)
    samples = policy.certificate.samples.model_copy(update=fields)
    certificate = policy.certificate.model_copy(update={"promises": (promise,), "samples": samples})
    return policy.model_copy(update={"certificate": certificate})


def audited(rate=1.0, monitor=None, n=200, seed=0, share=0.5):
    model, batch = network(), inputs(n)
    threshold = middle_threshold(model, batch, share)
    promised = consistency_monitor() if monitor is None else monitor
    policy = policy_for(promised, threshold, model.n_exits)
    return EarlyExit(model, policy, audit=Auditor(rate, monitor, seed=seed)), model, batch


def test_both_answers_are_given_for_all_requests_alike():
    fast, model, batch = audited()
    out, everything = fast(batch), every_output(model, batch)
    audit = out.audit
    assert audit.rows.tolist() == list(range(200))
    assert sorted(set(audit.ids)) == list(audit.ids)
    assert torch.equal(audit.outputs, out.outputs)
    assert torch.equal(audit.exits, out.exits)
    torch.testing.assert_close(audit.full_outputs, everything[:, -1])
    assert 0 < int((out.exits == model.n_exits - 1).sum()) < 200


def test_answers_do_not_change():
    fast, model, batch = audited(0.3)
    plain = EarlyExit(model, fast.policy)(batch)
    out = fast(batch)
    assert torch.equal(out.outputs, plain.outputs)
    assert torch.equal(out.exits, plain.exits)
    assert plain.audit is None


def test_only_who_left_early_is_run_again():
    batch = logits(50, 3)
    model = Played(3)
    policy = policy_of(0.9, 3)
    exits = EarlyExit(Played(3), policy)(batch).exits
    out = EarlyExit(model, policy, audit=1.0)(batch)
    again = [who for k, who in model.heads if k == 2][-1]
    assert len(again) == int((exits < 2).sum())
    assert torch.equal(out.audit.full_outputs, batch[:, 2])


def test_a_model_may_write_over_its_inputs():
    class Overwriting(Played):
        def begin(self, batch):
            state = super().begin(batch.clone())
            batch.zero_()
            return state

    batch = logits(30, 3)
    kept = batch.clone()
    out = EarlyExit(Overwriting(3), policy_of(0.6, 3), audit=1.0)(batch)
    assert torch.equal(out.audit.full_outputs, kept[:, 2])


@pytest.mark.parametrize("rate", [0.01, 0.3])
def test_the_share_is_as_asked(rate):
    fast, _, _ = audited(rate)
    n = sum(len(fast(inputs(500, seed=k)).audit.ids) for k in range(40))
    assert binomtest(n, 20_000, rate).pvalue > 1e-6


def test_the_choice_does_not_depend_on_the_request():
    """Early and full runs are audited alike: else no unweighted mean would be the risk."""
    fast, model, _ = audited(0.3)
    table = np.zeros((2, model.n_exits), int)
    for k in range(40):
        out = fast(inputs(500, seed=k))
        chosen = torch.zeros(500, dtype=torch.long)
        chosen[out.audit.rows] = 1
        np.add.at(table, (chosen.numpy(), out.exits.numpy()), 1)
    assert table.sum(axis=0).min() > 100
    assert chi2_contingency(table).pvalue > 1e-6


def test_ids_are_the_callers_or_new_ones_in_order():
    fast, _, _ = audited(0.5)
    parts = [fast(batch).audit for batch in inputs(100).split(30)]
    seen = [request for audit in parts for request in audit.ids]
    assert sorted(set(seen)) == seen
    assert fast.auditor.requests == 100
    own = [f"request {k}" for k in range(20)]
    audit = fast(inputs(20), ids=own).audit
    assert list(audit.ids) == [own[row] for row in audit.rows.tolist()]
    for wrong in (own[:-1], [*own[:-1], own[0]], [*own[:-1], ""], [*own[:-1], 7]):
        with refused("ids"):
            fast(inputs(20), ids=wrong)


def test_a_seed_fixes_the_choice_and_none_does_not():
    chosen = [audited(0.5, seed=seed)[0](inputs(200)).audit.rows.tolist() for seed in (1, 1, None)]
    assert chosen[0] == chosen[1] != chosen[2]


def test_nobody_chosen():
    fast, _, batch = audited(1e-9)
    audit = fast(batch).audit
    assert len(audit.ids) == len(audit.outputs) == 0
    assert audit.losses("consistency", "zero_one").shape == (0,)
    assert len(fast(inputs(0)).audit.ids) == 0


# ---------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("loss", ["zero_one", "brier"])
def test_losses_are_those_of_the_exits_taken(loss):
    fast, _, batch = audited(0.5)
    audit = fast(batch).audit
    truth = labels(200)[audit.rows]
    p = [each.double().softmax(1) for each in (audit.outputs, audit.full_outputs)]
    if loss == "zero_one":
        inconsistency = (p[0].argmax(1) != p[1].argmax(1)).double()
        against = [(each.argmax(1) != truth).double() for each in p]
    else:
        inconsistency = (p[0] - p[1]).square().sum(1)
        one_hot = torch.nn.functional.one_hot(truth, p[0].shape[1])
        against = [(each - one_hot).square().sum(1) for each in p]
    gap = (against[0] - against[1]).numpy()
    np.testing.assert_allclose(audit.losses("consistency", loss), inconsistency.numpy())
    np.testing.assert_allclose(audit.losses("gap", loss, truth), gap, atol=1e-12)
    clipped = audit.losses("zero-bounded gap", loss, truth)
    np.testing.assert_allclose(clipped, gap.clip(0), atol=1e-12)


def test_missing_labels_matter_only_where_answers_differ():
    fast, _, batch = audited()
    audit = fast(batch).audit
    unknown = torch.full((200,), -1)
    differ = audit.losses("consistency", "zero_one") > 0
    assert differ.any()
    gaps = audit.losses("gap", "zero_one", unknown)
    assert np.array_equal(np.isnan(gaps), differ)
    assert not gaps[~differ].any()
    assert np.isnan(audit.losses("gap", "brier", unknown)).all()


def test_what_cannot_be_computed_is_refused():
    audit = audited()[0](inputs(5)).audit
    with refused("labels"):
        audit.losses("gap", "zero_one")
    with refused("risk"):
        audit.losses("gaps", "zero_one")
    with refused("loss"):
        audit.losses("consistency", "zero_on")


# --------------------------------------------------------------------------------------- monitor


def test_consistency_is_folded_at_once_and_in_order():
    monitor = consistency_monitor("brier", high=2.0)
    fast, _, batch = audited(0.5, monitor)
    audits = [fast(part).audit for part in batch.split(30)]
    twin = consistency_monitor("brier", high=2.0)
    twin.update_many(np.concatenate([a.losses("consistency", "brier") for a in audits]))
    assert monitor.state() == twin.state()
    assert monitor.n > 50


def test_an_alarm_comes_when_exits_disagree():
    monitor = consistency_monitor(epsilon=0.01)
    fast, _, batch = audited(1.0, monitor, share=0.9)
    fast(batch)
    assert monitor.alarm


def test_gaps_are_folded_when_labels_come():
    fast, _, batch = audited(0.5)
    monitor = Monitor(0.3, 0.01, (-1.0, 1.0))
    order = RequestOrder(monitor)
    audits = [fast(part).audit for part in batch.split(50)]
    for audit in audits:
        for request in audit.ids:
            order.expect(request)
    truths = labels(200).split(50)
    for audit, truth in reversed(list(zip(audits, truths, strict=True))):  # the last come first
        gaps = audit.losses("gap", "zero_one", truth[audit.rows])
        for request, gap in zip(audit.ids, gaps.tolist(), strict=True):
            order.arrive(request, gap)
    twin = Monitor(0.3, 0.01, (-1.0, 1.0))
    for audit, truth in zip(audits, truths, strict=True):
        twin.update_many(audit.losses("gap", "zero_one", truth[audit.rows]))
    assert order.waiting == 0
    assert monitor.state() == twin.state()


def test_a_batch_that_fails_does_not_hold_up_the_others():
    class Failing(Played):
        def head(self, exit_index, state):
            if state["logits"].isnan().any():
                raise RuntimeError("out of memory")
            return super().head(exit_index, state)

    monitor = consistency_monitor()
    policy = policy_for(monitor, 0.9, 3)
    fast = EarlyExit(Failing(3), policy, audit=1.0, monitor=monitor)
    broken = logits(4, 3)
    broken[0, 2] = torch.nan
    with pytest.raises(RuntimeError, match="out of memory"):
        fast(broken)
    fast(logits(10, 3))
    assert fast.auditor.order.waiting == 0
    assert fast.auditor.order.given_up == 4
    assert monitor.n == 14


class FullFails(Played):
    """Runs out of memory wherever a sample that left early is run to the end."""

    def head(self, exit_index, state):
        if exit_index == 2 and state["logits"][:, 2].isnan().any():
            raise RuntimeError("out of memory")
        return super().head(exit_index, state)


def sure_of_first(n=6, row=2):
    """Logits of which one sample leaves at once, and has no answer of the full model."""
    batch = logits(n, 3)
    batch[row, 0] = torch.tensor([50.0, 0, 0, 0, 0])
    batch[row, 2] = torch.nan
    return batch


@pytest.mark.parametrize(
    ("model", "words"),
    [(Played, "exit 3 is NaN or infinite for sample 2"), (FullFails, "out of memory")],
)
def test_an_audit_that_fails_does_not_take_the_answer_with_it(model, words):
    batch, monitor = sure_of_first(), consistency_monitor()
    policy = policy_for(monitor, 0.99, 3)
    fast = EarlyExit(model(3), policy, audit=1.0, monitor=monitor)
    with pytest.warns(RuntimeWarning, match=words):
        out = fast(batch, ids=list("abcdef"))
    assert torch.equal(out.outputs, EarlyExit(Played(3), policy)(batch).outputs)
    fast(batch)  # the warning comes once
    assert (fast.auditor.failed, fast.auditor.order.given_up, monitor.n) == (12, 0, 12)
    assert monitor.mean == monitor.largest_loss  # a failed audit is never a zero
    assert fast.auditor.order.waiting == 0
    assert len(out.audit.ids) == len(out.audit.outputs) == 0
    assert out.audit.failed == tuple("abcdef")
    later = fast(logits(10, 3, seed=1)).audit
    assert later.failed == ()
    assert len(later.ids) == 10
    assert monitor.n == 22


def test_an_audit_that_fails_in_a_run_does_not_end_it():
    monitor = consistency_monitor()
    fast = EarlyExit(Played(3), policy_for(monitor, 0.99, 3), audit=1.0, monitor=monitor)
    stream = Stream(fast, 16)
    batches = [logits(6, 3), sure_of_first(), logits(6, 3, seed=2)]
    with pytest.warns(RuntimeWarning, match="audit of 6 requests failed"):
        outs = list(fast.auditor.follow(fast, batches, lambda b: stream.run(b, ordered=True)))
    assert [len(out.audit.ids) for out in outs] == [6, 0, 6]
    assert (fast.auditor.failed, fast.auditor.order.waiting, monitor.n) == (6, 0, 18)


def test_an_audit_that_fails_halfway_gives_up_only_what_has_no_loss(monkeypatch):
    monitor = consistency_monitor()
    fast = EarlyExit(Played(3), policy_for(monitor, 0.99, 3), audit=1.0, monitor=monitor)
    order, arrive = fast.auditor.order, fast.auditor.order.arrive

    def failing(request, loss):
        if request == "c":
            raise RuntimeError("interrupted")
        return arrive(request, loss)

    monkeypatch.setattr(order, "arrive", failing)
    with pytest.warns(RuntimeWarning, match="interrupted"):
        fast(logits(6, 3), ids=list("abcdef"))
    assert (order.given_up, order.waiting, monitor.n) == (1, 0, 6)
    assert order.state().given_up_requests == ("c",)


def test_threads_share_an_auditor():
    monitor = consistency_monitor()
    fast, _, _ = audited(0.5, monitor)
    seen = []

    def serve(seed):
        for k in range(10):
            seen.extend(fast(inputs(20, seed=100 * seed + k)).audit.ids)

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(seen)) == len(seen) == monitor.n
    assert fast.auditor.order.waiting == 0
    assert fast.auditor.requests == 800


# ------------------------------------------------------------------------------------ many batches


@pytest.mark.parametrize("gathered", [False, True])
def test_runs_are_audited_like_batches(gathered, monkeypatch):
    batches = inputs(200).split(30)
    one, _, _ = audited(0.5)
    expected = [one(batch) for batch in batches]
    fast, _, _ = audited(0.5)
    if gathered:  # what a run does on a GPU
        stream = Stream(fast, 64)
        outs = fast.auditor.follow(fast, batches, lambda each: stream.run(each, ordered=True))
    else:
        outs = fast.run(batches)
    outs = list(outs)
    assert [o.audit.rows.tolist() for o in outs] == [o.audit.rows.tolist() for o in expected]
    for out, other in zip(outs, expected, strict=True):
        torch.testing.assert_close(out.audit.full_outputs, other.audit.full_outputs)
        torch.testing.assert_close(out.audit.outputs, other.audit.outputs)


def test_a_run_that_is_broken_off_waits_for_nothing():
    monitor = consistency_monitor()
    fast, _, batch = audited(1.0, monitor)
    stream = Stream(fast, 500, max_wait=100)
    outs = fast.auditor.follow(
        fast, batch.split(20), lambda batches: stream.run(batches, ordered=True)
    )
    next(outs)
    outs.close()
    assert fast.auditor.order.waiting == 0
    assert fast.auditor.order.given_up == 180


# ------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("rate", [0.0, 1.5, -0.1, float("nan"), "much"])
def test_rates(rate):
    with refused("audit"):
        audited(rate)


def test_monitors_that_audits_cannot_feed():
    with refused("monitor"):
        EarlyExit(network(), policy_of(0.5, 4), monitor=consistency_monitor())
    with refused("monitor"):
        EarlyExit(network(), policy_of(0.5, 4), audit=0.1, monitor=Monitor(0.1))
    with pytest.raises(ValueError, match="gaps need labels"):
        Auditor(0.1, Monitor(0.1, risk="gap", loss="zero_one"))
    with refused("loss"):
        Auditor(0.1, consistency_monitor("rouge"))
    with refused("monitor"):
        EarlyExit(network(), policy_of(0.5, 4), audit=Auditor(0.1), monitor=consistency_monitor())


def test_monitors_of_another_promise():
    monitor = consistency_monitor()
    for other in (consistency_monitor(epsilon=0.4), consistency_monitor("brier", high=2.0)):
        with pytest.raises(ValueError, match="must watch what the policy promises"):
            EarlyExit(network(), policy_for(monitor, 0.5, 4), audit=0.1, monitor=other)
    with refused("monitor"):
        EarlyExit(network(), policy_of(0.5, 4), audit=Auditor(0.1, monitor))
    EarlyExit(network(), policy_for(monitor, 0.5, 4), audit=0.1, monitor=monitor)


@pytest.mark.parametrize("kind", [{"among": "exits"}, {"worst": 0.1}])
def test_a_promise_that_audits_cannot_watch(kind):
    monitor = consistency_monitor()
    policy = policy_for(monitor, 0.5, 4)
    promise = replace(policy.certificate.promises[0], **kind)
    certificate = policy.certificate.model_copy(update={"promises": (promise,)})
    with pytest.raises(ValueError, match="must watch what the policy promises"):
        Auditor(0.1, monitor).refuse_policy(policy.model_copy(update={"certificate": certificate}))


def test_a_promise_about_groups_is_not_fed_by_single_requests():
    monitor = consistency_monitor()
    per_sample = {"unit": "groups", "average": "sample", "max_group_size": 20}
    policy = policy_for(monitor, 0.5, 4, **per_sample)
    with pytest.raises(ValueError, match=r"Σℓ/M \+ ε \(1 − m/M\) per group.*M = 20"):
        EarlyExit(network(), policy, audit=0.1, monitor=monitor)
    policy = policy_for(monitor, 0.5, 4, unit="groups", average="group")
    assert Monitor.from_policy(policy).epsilon == monitor.epsilon
    with pytest.raises(ValueError, match=r"one mean of `out\.audit\.losses"):
        EarlyExit(network(), policy, audit=0.1, monitor=monitor)
    assert EarlyExit(network(), policy, audit=1.0)(inputs(5)).audit.rows.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("label", ["argmax", "sample"])
def test_labels_drawn_from_the_full_model_are_another_loss(label):
    record = ss.ExitRecord.from_logits(logits(300, 4).numpy(), label=label)
    for loss, known in (("zero_one", True), ("brier", False)):
        policy = ss.calibrate(record, risk="consistency", loss=loss, epsilon=0.5)
        monitor = Monitor.from_policy(policy)
        if known:
            Auditor(0.1, monitor)
        else:
            with pytest.raises(ValueError, match="label='expected'"):
                Auditor(0.1, monitor)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda fast: torch.save(fast, io.BytesIO())], ids=["copy", "save"]
)
def test_copies_are_refused_with_a_reason(copied):
    fast, _, _ = audited(0.5)
    with pytest.raises(TypeError, match="make a new EarlyExit"):
        copied(fast)


# ------------------------------------------------------------------------------------ odd batches


class Scaled(Staged):
    """Takes a batch of logits with a scale, which has no batch axis."""

    n_exits = 3

    def begin(self, batch):
        return batch["x"] * batch["scale"].sum()

    def head(self, exit_index, state):
        return state[:, exit_index]

    def advance(self, exit_index, state):
        return state


@pytest.mark.parametrize("scale", [torch.tensor(2.0), torch.ones(1), torch.ones(20)])
def test_what_is_of_all_requests_is_not_cut(scale):
    monitor = consistency_monitor()
    policy = policy_for(monitor, 0.9, 3)
    fast = EarlyExit(Scaled().eval(), policy, audit=Auditor(0.5, monitor, seed=0))
    for seed in range(5):
        x = logits(40, 3, seed=seed)
        out = fast({"x": x, "scale": scale})
        expected = (x * scale.sum())[out.audit.rows, 2]
        assert 0 < len(out.audit.ids) < 40
        torch.testing.assert_close(out.audit.full_outputs, expected)
    assert fast.auditor.order.waiting == 0


def test_a_batch_that_cannot_be_cut_leaves_nobody_waiting(monkeypatch):
    monitor = consistency_monitor()
    fast, _, batch = audited(1.0, monitor)
    with monkeypatch.context() as patch:
        patch.setattr("swiftsure.torch.audit._ChosenRequests.of", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fast(batch)
    fast(batch)
    assert (fast.auditor.order.waiting, monitor.n) == (0, 200)


# ----------------------------------------------------------------------------------------- images


class Maps(Staged):
    """Maps of logits at an eighth of the images' size."""

    n_exits = 2

    def begin(self, batch):
        return torch.nn.functional.avg_pool2d(batch, 8) * 8

    def advance(self, exit_index, state):
        return state if exit_index == 0 else state + 0.7 * state.roll(1, dims=1)

    def head(self, exit_index, state):
        return state


@pytest.mark.parametrize("loss", ["miou", "miscoverage", "pixel_brier"])
@pytest.mark.parametrize("labelled", [False, True])
def test_images_are_compared_as_in_the_record(loss, labelled):
    model = Maps().eval()
    images = torch.randn(30, 3, 32, 24, generator=torch.Generator().manual_seed(0))
    batch = (images, torch.zeros(30, 32, 24, dtype=torch.long)) if labelled else images
    record = collect(model, [batch], losses=[loss], scores=["mean_top1"])
    monitor = consistency_monitor(loss, high=LOSSES[loss].range.high)
    policy = policy_for(monitor, 0.0, 2).model_copy(update={"score": "mean_top1"})
    audit = EarlyExit(model, policy, audit=1.0, monitor=monitor)(images).audit
    expected = record.inconsistencies[loss][:, 0]
    np.testing.assert_allclose(audit.losses("consistency", loss), expected, atol=1e-6)
    assert monitor.mean == pytest.approx(expected.mean(), abs=1e-6)
    assert not np.allclose(_at_own_size(audit, loss), expected, atol=1e-3)


def _at_own_size(audit, loss):
    found = image_losses([audit.outputs, audit.full_outputs], names=[loss])
    return found[f"inconsistencies/{loss}"][:, 0].numpy()
