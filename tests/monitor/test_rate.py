"""Audits that choose their own rate find a risk in time, as a drill confirms."""

import numpy as np
import pytest

from swiftsure.monitor import Monitor, audit_rate
from swiftsure.serve.audits import AuditQueue


def drill(rate, epsilon, detect, within, seed):
    """Whether an alarm comes within some drifted requests, of which the queue chooses audits."""
    rng = np.random.default_rng([17, seed])
    monitor = Monitor(epsilon, 0.01)
    queue = AuditQueue(rate, 10**9, seed=seed)
    for risk, n in ((epsilon / 2, 3000), (detect, within)):
        audited = sum(queue.choose() is not None for _ in range(n))
        monitor.update_many((rng.random(audited) < risk).astype(float))
    return monitor.alarm


@pytest.mark.parametrize(("epsilon", "detect", "within"), [(0.05, 0.1, 2000), (0.02, 0.08, 1000)])
def test_a_drill_confirms_the_rate(epsilon, detect, within):
    rate = audit_rate(epsilon, detect=detect, within=within)
    found = np.mean([drill(rate, epsilon, detect, within, seed) for seed in range(400)])
    assert found >= 0.86  # promised 0.9; the standard error is 0.015
    lower = np.mean([drill(rate / 2, epsilon, detect, within, seed) for seed in range(400)])
    assert lower < found - 0.1  # a lower rate would not do


def test_more_requests_need_fewer_audits():
    rates = [audit_rate(0.05, detect=0.1, within=n) for n in (1500, 3000, 6000)]
    assert rates[0] > rates[1] > rates[2]


def test_what_cannot_be_found_is_refused():
    with pytest.raises(ValueError, match="even if all are audited"):
        audit_rate(0.05, detect=0.06, within=100)
    with pytest.raises(ValueError, match="detect"):
        audit_rate(0.05, detect=0.04, within=1000)
