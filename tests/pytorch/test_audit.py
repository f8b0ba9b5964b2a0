"""Audits: a fair share of requests, run in full, whatever way they went."""

import threading

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, chi2_contingency

from pytorch.builders import (
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
from swiftsure.monitor import Monitor, RequestOrder
from swiftsure.torch import Auditor, EarlyExit, Stream


def consistency_monitor(loss="zero_one", epsilon=0.5, high=1.0):
    return Monitor(epsilon, 0.01, (0.0, high), risk="consistency", loss=loss)


def audited(rate=1.0, monitor=None, n=200, seed=0, share=0.5):
    model, batch = network(), inputs(n)
    policy = policy_of(middle_threshold(model, batch, share), model.n_exits)
    return EarlyExit(model, policy, audit=Auditor(rate, monitor, seed=seed)), model, batch


def test_both_answers_are_given_for_all_requests_alike():
    fast, model, batch = audited()
    out, everything = fast(batch), every_output(model, batch)
    audit = out.audit
    assert audit.ids.tolist() == audit.rows.tolist() == list(range(200))
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


def test_numbers_count_all_requests():
    fast, _, _ = audited(0.5)
    parts = [fast(batch) for batch in inputs(100).split(30)]
    starts = np.cumsum([0, 30, 30, 30])
    for start, part in zip(starts, parts, strict=True):
        assert (part.audit.ids - part.audit.rows).eq(int(start)).all()
    assert fast.auditor.requests == 100
    later = EarlyExit(fast.model, fast.policy, audit=Auditor(1.0, first_id=100))
    assert later(inputs(2)).audit.ids.tolist() == [100, 101]


def test_a_seed_fixes_the_choice_and_none_does_not():
    chosen = [audited(0.5, seed=seed)[0](inputs(200)).audit.ids.tolist() for seed in (1, 1, None)]
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
    with refused("losses"):
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
        for request in audit.ids.tolist():
            order.expect(request)
    truth = labels(200)
    for audit in reversed(audits):  # the last labels come first
        gaps = audit.losses("gap", "zero_one", truth[audit.ids])
        for request, gap in zip(audit.ids.tolist(), gaps.tolist(), strict=True):
            order.arrive(request, gap)
    twin = Monitor(0.3, 0.01, (-1.0, 1.0))
    for audit in audits:
        twin.update_many(audit.losses("gap", "zero_one", truth[audit.ids]))
    assert order.waiting == 0
    assert monitor.state() == twin.state()


def test_a_batch_that_fails_does_not_hold_up_the_others():
    class Failing(Played):
        def head(self, exit_index, state):
            if exit_index == 2 and state["logits"].isnan().any():
                raise RuntimeError("out of memory")
            return super().head(exit_index, state)

    monitor = consistency_monitor()
    fast = EarlyExit(Failing(3), policy_of(0.9, 3), audit=1.0, monitor=monitor)
    broken = logits(4, 3)
    broken[0, 2] = torch.nan
    with pytest.raises(RuntimeError, match="out of memory"):
        fast(broken)
    fast(logits(10, 3))
    assert fast.auditor.order.waiting == 0
    assert fast.auditor.order.given_up == 4
    assert monitor.n == 14


def test_a_broken_answer_of_the_full_model_is_no_loss():
    batch = logits(6, 3)
    batch[2, 0] = torch.tensor([50.0, 0, 0, 0, 0])
    batch[2, 2] = torch.nan
    fast = EarlyExit(Played(3), policy_of(0.99, 3), audit=1.0, monitor=consistency_monitor())
    with pytest.raises(ValueError, match="exit 3 is NaN for sample 2"):
        fast(batch)
    assert fast.auditor.order.waiting == 0


def test_threads_share_an_auditor():
    monitor = consistency_monitor()
    fast, _, _ = audited(0.5, monitor)
    seen = []

    def serve(seed):
        for k in range(10):
            seen.extend(fast(inputs(20, seed=100 * seed + k)).audit.ids.tolist())

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
    assert [out.audit.ids.tolist() for out in outs] == [o.audit.ids.tolist() for o in expected]
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
    with refused("losses"):
        Auditor(0.1, consistency_monitor("rouge"))
    with refused("monitor"):
        EarlyExit(network(), policy_of(0.5, 4), audit=Auditor(0.1), monitor=consistency_monitor())
