"""Audits of exported models: the same choice, answers and losses as in PyTorch."""

import subprocess
import sys
import warnings

import numpy as np
import pytest
from scipy.stats import binomtest

from swiftsure import onnx
from swiftsure import torch as st
from swiftsure.monitor import Monitor
from tests.torch import test_audit as in_torch
from tests.torch.builders import inputs, labels


def both(model, policy, exported, rate=1.0, monitors=(None, None), n=200):
    """The audits of one batch in PyTorch and in ONNX Runtime, chosen with one seed."""
    batch = inputs(n)
    fast = st.EarlyExit(model, policy, audit=st.Auditor(rate, monitors[0], seed=3))
    auditor = onnx.Auditor(rate, monitors[1], seed=3)
    exports = onnx.EarlyExit(onnx.Stages.load(exported, threads=1), policy, audit=auditor)
    return fast(batch).audit, exports(batch.numpy()).audit


def test_the_same_audits_as_in_pytorch(model, policy, exported):
    expected, found = both(model, policy, exported, 0.4)
    assert 0 < len(found.ids) < 200
    np.testing.assert_array_equal(found.rows, expected.rows)
    np.testing.assert_array_equal(found.exits, expected.exits)
    assert len(set(found.exits.tolist())) > 1
    np.testing.assert_allclose(found.outputs, expected.outputs, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found.full_outputs, expected.full_outputs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("loss", ["zero_one", "brier"])
@pytest.mark.parametrize("risk", ["consistency", "gap", "zero-bounded gap"])
def test_the_same_losses_as_in_pytorch(model, policy, exported, loss, risk):
    expected, found = both(model, policy, exported)
    truth = labels(200).clone()
    truth[::7] = -1
    assert np.isnan(found.losses("gap", "brier", truth.numpy())).any()
    np.testing.assert_allclose(
        found.losses(risk, loss, truth.numpy()), expected.losses(risk, loss, truth), atol=1e-5
    )


def test_a_monitor_hears_of_them(model, policy, exported):
    monitors = [in_torch.consistency_monitor() for _ in range(2)]
    promised = in_torch.policy_for(monitors[0], policy.threshold, model.n_exits)
    both(model, promised, exported, monitors=monitors)
    assert monitors[1].n == monitors[0].n == 200
    assert monitors[1].state().model_dump() == monitors[0].state().model_dump()


def test_answers_do_not_change(policy, exported):
    batch = inputs(50).numpy()
    plain = onnx.EarlyExit.load(exported)(batch)
    out = onnx.EarlyExit.load(exported, audit=0.3)(batch, ids=[f"request {k}" for k in range(50)])
    np.testing.assert_array_equal(out.outputs, plain.outputs)
    assert plain.audit is None
    assert [f"request {row}" for row in out.audit.rows.tolist()] == list(out.audit.ids)


def test_the_share_is_as_asked(exported):
    fast = onnx.EarlyExit.load(exported, audit=0.3)
    n = sum(len(fast(inputs(500, seed=k).numpy()).audit.ids) for k in range(20))
    assert binomtest(n, 10_000, 0.3).pvalue > 1e-6
    assert fast.auditor.requests == 10_000


def test_streams_are_audited(exported):
    fast = onnx.EarlyExit.load(exported, audit=1.0)
    batches = [inputs(n, seed=n).numpy() for n in (5, 0, 9, 3)]
    stream = onnx.Stream(fast, 4)
    outs = list(fast.auditor.follow(fast, iter(batches), stream.ordered))
    assert [len(out.audit.ids) for out in outs] == [5, 0, 9, 3]
    for out, batch in zip(outs, batches, strict=True):
        if len(batch):
            alone = fast(batch).audit
            np.testing.assert_allclose(out.audit.full_outputs, alone.full_outputs, atol=1e-5)


def test_a_failed_audit_does_not_cost_the_answer(exported, monkeypatch):
    monitor = in_torch.consistency_monitor()
    fast = onnx.EarlyExit.load(exported)
    auditor = onnx.Auditor(1.0, monitor)
    fast.auditor = auditor

    def fail(_state):
        raise MemoryError("no room")

    monkeypatch.setattr(fast, "full_outputs", fail)
    with pytest.warns(RuntimeWarning, match="no room"):
        out = fast(inputs(20).numpy())
    assert len(out.exits) == 20
    assert len(out.audit.failed) == auditor.failed == 20
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast(inputs(20).numpy())
    assert monitor.n == 40  # given up: they count as the lowest loss


def test_what_cannot_be_watched_is_refused(policy, exported):
    with pytest.raises(ValueError, match="`monitor` must watch a consistency risk"):
        onnx.EarlyExit.load(exported, audit=0.1, monitor=Monitor(0.1, risk="gap", loss="zero_one"))
    with pytest.raises(ValueError, match="`monitor` needs `audit`"):
        onnx.EarlyExit.load(exported, monitor=in_torch.consistency_monitor())
    with pytest.raises(ValueError, match="`audit`"):
        onnx.EarlyExit.load(exported, audit=2.0)


def test_it_needs_no_pytorch(exported):
    code = (
        "import sys, numpy as np; from swiftsure import onnx;"
        f"fast = onnx.EarlyExit.load({str(exported)!r}, audit=1.0);"
        f"out = fast(np.zeros({tuple(inputs(3).shape)}, np.float32));"
        "print(out.audit.losses('consistency', 'brier').shape, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["(3,)", "False"]
