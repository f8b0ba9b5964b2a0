"""Monitor, RequestOrder, Drift, Watch: what they hold, refuse, and give back after a restart."""

import copy
import io
import json
import multiprocessing
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import swiftsure as ss
from swiftsure.monitor import (
    Drift,
    Monitor,
    RequestOrder,
    StreamFaultError,
    Watch,
    request_ids,
)
from swiftsure.study.simulate import Population


def refused(name):
    """Expect an error about the argument `name`, which it puts in backticks."""
    return pytest.raises((ValueError, TypeError), match=rf"`{name}\b[^`]*`")


def losses(n=500, risk=0.1, seed=0):
    return (np.random.default_rng(seed).random(n) < risk).astype(float)


@pytest.fixture(scope="module")
def record():
    sample = Population(n_exits=4, overconfidence=1.5).sample(800, 0)
    return ss.ExitRecord.from_logits(sample.logits, sample.labels, costs={"flops": [1, 2, 3, 5]})


@pytest.fixture(scope="module")
def policy(record):
    return ss.calibrate(record, loss="zero_one", epsilon=0.05)


# --------------------------------------------------------------------------------------- monitor


def test_before_the_first_loss():
    monitor = Monitor(0.05)
    assert (monitor.n, monitor.alarm, monitor.alarm_at) == (0, False, None)
    assert (monitor.evidence, monitor.p_value) == (1.0, 1.0)
    assert np.isnan(monitor.mean)
    assert "no loss was seen" in str(monitor)


@settings(max_examples=50)
@given(
    st.lists(st.floats(-1, 1), min_size=1, max_size=60),
    st.lists(st.integers(0, 60), max_size=4),
    st.sampled_from([0.01, 0.3, 0.9]),
)
def test_one_by_one_and_many_at_once_agree_to_the_last_bit(values, cuts, epsilon):
    one, many = (Monitor(epsilon, 0.3, (-1, 1)) for _ in range(2))
    for value in values:
        one.update(value)
    for part in np.split(np.asarray(values), sorted(cuts)):
        many.update_many(part)
    assert one.state() == many.state()
    assert one.mean == pytest.approx(np.mean(values))


def test_any_kind_of_number_will_do():
    monitor = Monitor(0.05)
    for value in (1, True, np.float32(0.5), np.int64(0), np.bool_(False)):
        monitor.update(value)
    monitor.update_many(np.asarray([True, False]))
    monitor.update_many([0, 1])
    monitor.update_many(np.linspace(0, 1, 20)[::2])  # not contiguous
    monitor.update_many([])
    assert monitor.n == 5 + 2 + 2 + 10


def test_an_alarm_stays_and_numbers_stay_finite():
    monitor = Monitor(0.05)
    assert monitor.update_many(np.ones(100_000))
    first = monitor.alarm_at
    assert np.isfinite(monitor.evidence)
    assert np.isfinite(monitor.state().wealth).all()
    assert monitor.update_many(np.zeros(1000))
    assert monitor.alarm_at == first < 20
    assert monitor.update(0.0) is True
    assert "Alarm at loss" in str(monitor)
    assert "at most 1 % over all time" in str(monitor)


def test_the_p_value_is_that_of_the_largest_evidence():
    monitor, largest = Monitor(0.05), 1.0
    for value in losses(300):
        monitor.update(value)
        largest = max(largest, monitor.evidence)
    assert monitor.p_value == pytest.approx(1 / largest)
    assert monitor.alarm == (largest >= 100)


def test_recent_losses_are_told_from_all():
    monitor = Monitor(0.05)
    monitor.update_many(np.zeros(500))
    monitor.update_many(np.ones(500))
    assert monitor.recent_mean == pytest.approx(0.5)
    monitor.update_many(np.zeros(20_000))
    assert monitor.recent_mean < 1e-6 < monitor.mean


def test_the_alarm_comes_when_the_evidence_reaches_its_goal():
    monitor, first = Monitor(0.05, 0.02), None
    for t, value in enumerate(losses(2000, 0.12), start=1):
        raised = monitor.update(value)
        if first is None and monitor.evidence >= 50:
            first = t
        assert raised == (first is not None)
    assert first is not None
    assert monitor.alarm_at == first


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf"), "0.5", None, [0.5]])
def test_bad_losses_are_refused_and_leave_no_trace(value):
    monitor = Monitor(0.05)
    monitor.update_many(losses(50))
    before = monitor.state()
    with refused("loss"):
        monitor.update(value)
    with refused("losses"):
        monitor.update_many([0.0, 1.0, value])
    assert monitor.state() == before


def test_rounding_past_the_bound_is_mended():
    monitor, twin = Monitor(0.05, loss_range=(0, 2)), Monitor(0.05, loss_range=(0, 2))
    monitor.update(2.0000001)
    monitor.update_many([-1e-9, 2.0000001])
    twin.update_many([2.0, 0.0, 2.0])
    assert monitor.state() == twin.state()


def test_shapes_are_refused():
    with refused("losses"):
        Monitor(0.05).update_many(np.zeros((2, 2)))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": 1.0}, "epsilon"),
        ({"epsilon": float("nan")}, "epsilon"),
        ({"epsilon": 0.1, "alpha": 0.0}, "alpha"),
        ({"epsilon": 0.1, "alpha": 1.0}, "alpha"),
        ({"epsilon": 0.1, "alpha": 1e-191}, "alpha"),
        ({"epsilon": 0.1, "loss_range": (0, np.inf)}, "loss_range"),
        ({"epsilon": 0.1, "loss_range": (0.2, 1)}, "epsilon"),
        ({"epsilon": 0.1, "loss_range": 1}, "loss_range"),
    ],
)
def test_arguments_are_checked(arguments, name):
    with refused(name):
        Monitor(**arguments)


def test_the_least_alpha_can_be_reached():
    monitor = Monitor(0.1, 1e-190)
    assert monitor.update_many(np.ones(5000))
    assert np.isfinite(monitor.evidence)


def test_smaller_alpha_never_alarms_sooner():
    stream = losses(3000, 0.12)
    at = []
    for alpha in (0.2, 0.05, 0.01, 0.001):
        monitor = Monitor(0.05, alpha)
        monitor.update_many(stream)
        at.append(monitor.alarm_at)
    assert at == sorted(at)


# ----------------------------------------------------------------------------------- from policies


def test_a_monitor_of_what_a_policy_promises(policy):
    monitor = Monitor.from_policy(policy, alpha=0.02)
    assert (monitor.epsilon, monitor.alpha) == (0.05, 0.02)
    assert (monitor.loss_range.low, monitor.loss_range.high) == (-1, 1)
    assert (monitor.risk, monitor.loss) == ("gap", "zero_one")
    assert "zero_one gap to the full model" in str(Monitor.from_state(monitor.state()).subject)


def test_one_of_several_promises(record):
    policy = ss.calibrate(
        record,
        [
            ss.Promise("zero_one", epsilon=0.1),
            ss.Promise("brier", risk="consistency", epsilon=0.3),
        ],
    )
    assert Monitor.from_policy(policy, risk="consistency").epsilon == 0.3
    assert Monitor.from_policy(policy, loss="zero_one").epsilon == 0.1
    with pytest.raises(ValueError, match=r"gap of zero_one ≤ 0\.1, consistency of brier ≤ 0\.3"):
        Monitor.from_policy(policy)
    with pytest.raises(ValueError, match="Did you mean 'gap'"):
        Monitor.from_policy(policy, risk="gaps")


def test_a_policy_must_be_one():
    with refused("policy"):
        Monitor.from_policy({"threshold": 0.5})


PROMISED = {
    "risk": ("ucb", None),
    "mean": ("crc", "on average over the draw of its calibration samples"),
    "pool": ("ucb", "for the pool that its calibration samples were drawn from"),
    "nothing": ("empirical", "the policy makes none"),
}


@pytest.mark.parametrize("promised", PROMISED)
def test_an_alarm_says_where_it_breaks_no_promise(promised, tmp_path):
    """A policy of crc or of a pool does not promise the risk that is watched."""
    control, said = PROMISED[promised]
    record = ss.ThresholdRecord([1.0, 0.5], losses={"zero_one": np.zeros((500, 2))})
    record = record.drawn_from(2000) if promised == "pool" else record
    monitor = Monitor.from_policy(ss.calibrate(record, epsilon=0.05, control=control))
    assert "promise" not in str(monitor)
    monitor.update_many(np.ones(100))
    monitor.save(tmp_path / "monitor.json")
    for each in (monitor, Monitor.load(tmp_path / "monitor.json"), copy.copy(monitor)):
        assert str(each).startswith("Alarm at loss")
        assert ("promise" in str(each)) == (said is not None)
        assert said is None or said in str(each)


def test_a_policy_whose_level_is_no_level(policy):
    promise = replace(policy.certificate.promises[0], epsilon=1.5)
    certificate = policy.certificate.model_copy(update={"promises": (promise,)})
    with refused("epsilon"):
        Monitor.from_policy(policy.model_copy(update={"certificate": certificate}))


# ------------------------------------------------------------------------------------------ states


def test_a_state_is_restored_exactly(tmp_path):
    path, stream = tmp_path / "state.json", losses(2000, 0.05)
    through = Monitor(0.05, 0.013, risk="gap", loss="zero_one")
    resumed = Monitor(0.05, 0.013, risk="gap", loss="zero_one")
    through.update_many(stream)
    for part in np.split(stream, [1, 700, 1500]):
        resumed.update_many(part)
        resumed.save(path)
        resumed = Monitor.load(path)
    assert resumed.state() == through.state()
    assert str(resumed) == str(through)


def edited(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


DAMAGES = {
    "cut": lambda path: path.write_text(path.read_text()[:-40]),
    "empty": lambda path: path.write_text(""),
    "binary": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "a wealth changed": lambda path: edited(
        path, lambda c: c["monitor"]["wealth"].__setitem__(0, 1)
    ),
    "a key lost": lambda path: edited(path, lambda c: c.pop("monitor")),
    "no checksum": lambda path: edited(path, lambda c: c.pop("checksum")),
    "version": lambda path: edited(path, lambda c: c.update(version="x")),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_state_is_refused_and_kept(tmp_path, damage):
    path = tmp_path / "state.json"
    monitor = Monitor(0.05)
    monitor.update_many(losses(100))
    monitor.save(path)
    damage(path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="damaged monitor state"):
        Monitor.load(path)
    assert path.read_bytes() == before


def test_numbers_that_no_monitor_has_are_refused(tmp_path):
    """Even if the checksum is theirs."""
    from swiftsure._lib.files import json_checksum

    path = tmp_path / "state.json"
    for field, value in [("wealth", [0.1]), ("n", -1), ("peak", 0.5), ("wealth", [-1.0] * 12)]:
        path.unlink(missing_ok=True)
        Monitor(0.05).save(path)
        content = json.loads(path.read_text())
        content["monitor"][field] = value
        content["checksum"] = json_checksum({"monitor": content["monitor"]})
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=f"damaged monitor state .*: {field}"):
            Monitor.load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alarm_at": None}, "do not fit α"),
        ({"alarm_at": None, "peak": 1.0}, "exceeds its peak"),
        ({"alarm_at": 10**400}, "alarm_at"),
        ({"alarm_at": 201}, "alarm cannot be at loss 201 of 200"),
        ({"alarm_at": True}, "alarm_at"),
        ({"n": 0}, "sum of 0 losses"),
        ({"n": 0, "total": 0.0}, "exceeds its peak|before the first loss"),
        ({"n": "200"}, "n:"),
        ({"n": 10**400}, "n:"),
        ({"total": 500.0}, "sum of 200 losses cannot be 500"),
        ({"total": -1.0}, "sum of 200 losses"),
        ({"recent": 2.0}, "recent losses cannot be 2"),
        ({"alpha": 0.0}, "alpha"),
        ({"alpha": 1e-100}, "do not fit α"),
        ({"epsilon": 7.0}, "epsilon"),
        ({"epsilon": 10**400}, "epsilon"),
        ({"loss_range": [1, 0]}, "loss_range"),
        ({"risk": 3}, "risk"),
    ],
)
def test_states_that_no_losses_lead_to_are_refused(tmp_path, changes, message):
    from swiftsure._lib.files import json_checksum

    path = tmp_path / "state.json"
    monitor = Monitor(0.05)
    monitor.update_many(losses(200, risk=0.5))
    assert monitor.alarm
    monitor.save(path)
    content = json.loads(path.read_text())
    content["monitor"].update(changes)
    content["checksum"] = json_checksum({"monitor": content["monitor"]})
    path.write_text(json.dumps(content))
    for load in (Monitor.load, Watch.load):
        with pytest.raises(ValueError, match=f"damaged monitor state .*: .*({message})") as caught:
            load(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_an_alarm_cannot_be_removed_from_a_new_state(tmp_path):
    from swiftsure._lib.files import json_checksum

    path = tmp_path / "state.json"
    Monitor(0.05).save(path)
    content = json.loads(path.read_text())
    content["monitor"]["wealth"] = [1e5] * 12
    content["checksum"] = json_checksum({"monitor": content["monitor"]})
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="exceeds its peak"):
        Monitor.load(path)


def test_numbers_that_are_too_large_are_refused():
    huge = 10**400
    monitor = Monitor(0.05)
    for fold in (monitor.update, lambda loss: RequestOrder(monitor).arrive(1, loss)):
        for value in (huge, -huge):
            with refused("loss"):
                fold(value)
    assert monitor.n == 0
    for arguments in ({"epsilon": huge}, {"epsilon": 0.1, "alpha": huge}):
        with refused(next(reversed(arguments))):
            Monitor(**arguments)
    for values in ((0, huge), (-huge, 1), (0, "1"), 3):
        with refused("loss_range"):
            Monitor(0.05, loss_range=values)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Monitor(0.1, risk=3), "risk"),
        (lambda: Monitor(0.1, loss=["x"]), "loss"),
        (lambda: RequestOrder(None), "monitor"),
        (lambda: RequestOrder(0.05), "monitor"),
    ],
)
def test_other_types_are_refused_at_once(make, name):
    with pytest.raises(TypeError, match=f"`{name}` must be"):
        make()


def test_other_files_are_told_apart(tmp_path, policy):
    path = tmp_path / "policy.json"
    policy.save(path)
    with pytest.raises(ValueError, match="not the state of a Swiftsure monitor"):
        Monitor.load(path)
    with refused("path"):
        Monitor.load(tmp_path / "none.json")
    before = path.read_bytes()
    with pytest.raises(ValueError, match="not the state of a Swiftsure monitor"):
        Monitor(0.05).save(path)
    assert path.read_bytes() == before
    path.unlink()
    Monitor(0.05).save(path)
    edited(path, lambda c: c.update(version=2))
    with pytest.raises(ValueError, match="newer Swiftsure"):
        Monitor.load(path)


# ------------------------------------------------------------------------------------------- order


@settings(max_examples=50)
@given(st.permutations(range(30)), st.integers(0, 5))
def test_any_order_of_arrival_is_folded_in_request_order(arrival, seed):
    stream = losses(30, 0.4, seed)
    order, twin = RequestOrder(Monitor(0.3)), Monitor(0.3)
    for request in range(30):
        order.expect(10 * request)
    for k, request in enumerate(arrival):
        order.arrive(10 * request, stream[request])
        first_missing = min(set(range(30)) - set(arrival[: k + 1]), default=30)
        assert order.monitor.n == first_missing
    twin.update_many(stream)
    assert order.monitor.state() == twin.state()
    assert order.waiting == 0


def test_each_request_has_one_loss():
    order = RequestOrder(Monitor(0.05))
    order.arrive(3, 0.0)
    order.expect(5)
    order.expect(7)
    order.arrive(7, 1.0)
    for again in (3, 4, 7):
        with refused("request"):
            order.arrive(again, 0.0)
    with refused("request"):
        order.expect(5)
    with refused("request"):
        order.expect(-1)
    with refused("request"):
        order.expect(8.5)
    with refused("loss"):
        order.arrive(5, 2.0)
    assert (order.monitor.n, order.waiting) == (1, 2)


@pytest.mark.parametrize("missing", ["lowest", "skip"])
def test_patience_ends(missing):
    order = RequestOrder(Monitor(0.05, loss_range=(-1, 1)), patience=3, missing=missing)
    order.expect(0)
    for request in (1, 2):
        order.arrive(request, 1.0)
    assert (order.monitor.n, order.waiting) == (0, 3)
    order.arrive(3, 1.0)
    assert order.waiting == 0
    assert order.given_up == 1
    assert order.monitor.mean == (0.5 if missing == "lowest" else 1.0)
    order.arrive(0, 1.0)  # its place has passed
    assert order.too_late == 1
    assert order.monitor.n == (4 if missing == "lowest" else 3)


def test_orders_are_checked():
    with refused("patience"):
        RequestOrder(Monitor(0.05), patience=0)
    with refused("missing"):
        RequestOrder(Monitor(0.05), missing="ignore")


def test_memory_is_what_waits():
    order = RequestOrder(Monitor(0.05), patience=100)
    for request in range(10_000):
        order.expect(request)
        assert order.waiting <= 100


def everything(order):
    return order.state(), order.monitor.state()


def assert_out_of_order(order, request, words="each has one loss"):
    """Expect that a loss of a request is refused, and changes nothing."""
    before = everything(order)
    for loss in (0.0, 1.0):
        with pytest.raises(ValueError, match=rf"`request` must.*got {request}\b.*{words}"):
            order.arrive(request, loss)
    assert everything(order) == before


@pytest.fixture(params=["lowest", "skip"])
def one_given_up(request):
    """Requests 10, 20, 30, 40, of which 20 was given up and the others are folded."""
    order = RequestOrder(Monitor(0.05), missing=request.param)
    order.arrive(10, 1.0)
    order.expect(20)
    for later in (30, 40):
        order.arrive(later, 0.0)
    order.give_up(20)
    return order


def test_a_second_loss_is_refused_after_another_request_was_given_up(one_given_up):
    for folded in (10, 30, 40):
        assert_out_of_order(one_given_up, folded)


def test_a_late_loss_that_was_not_announced_is_refused_after_a_request_was_given_up(one_given_up):
    for unknown in (0, 15, 39):
        assert_out_of_order(one_given_up, unknown)


def test_a_request_that_was_given_up_may_have_one_late_loss(one_given_up):
    before = one_given_up.monitor.state()
    assert one_given_up.arrive(20, 1.0) is False
    assert (one_given_up.given_up, one_given_up.too_late) == (1, 1)
    assert one_given_up.monitor.state() == before
    assert_out_of_order(one_given_up, 20)


@pytest.mark.parametrize("missing", ["lowest", "skip"])
def test_a_late_loss_may_come_while_earlier_requests_wait(missing):
    order = RequestOrder(Monitor(0.05), missing=missing)
    for request in (1, 2, 3):
        order.expect(request)
    order.give_up(2)
    order.arrive(2, 1.0)
    assert order.too_late == 1
    assert_out_of_order(order, 2)
    order.arrive(1, 0.0)
    order.arrive(3, 0.0)
    assert (order.monitor.n, order.monitor.mean) == (3 if missing == "lowest" else 2, 0.0)


def test_giving_up_twice_counts_once(one_given_up):
    before = everything(one_given_up)
    one_given_up.give_up(20)
    assert everything(one_given_up) == before


@pytest.mark.parametrize("unknown", [10, 15, 30, 50])
def test_only_a_request_that_waits_can_be_given_up(one_given_up, unknown):
    """One that was never announced would be left out, though "lowest" promises to count it."""
    before = everything(one_given_up)
    with refused("request"):
        one_given_up.give_up(unknown)
    assert everything(one_given_up) == before


def test_nothing_can_be_given_up_at_the_start():
    with pytest.raises(ValueError, match="never announced with `expect`"):
        RequestOrder(Monitor(0.05)).give_up(0)


@pytest.mark.parametrize("request_", [True, 1.0, np.float64(1.0), ""])
def test_what_is_not_a_whole_number_is_not_found_as_one(request_):
    order = RequestOrder(Monitor(0.05))
    order.expect(1)
    with refused("request"):
        order.arrive(request_, 1.0)
    with refused("request"):
        order.give_up(request_)
    assert (order.monitor.n, order.waiting) == (0, 1)


def test_strings_are_ids_too_and_each_has_one_loss(monkeypatch):
    monkeypatch.setattr("swiftsure.monitor.order.REMEMBERED_DONE", 3)
    order = RequestOrder(Monitor(0.05))
    order.expect("b")
    order.expect("a")  # strings have no order but that of their announcement
    order.arrive("a", 1.0)
    order.arrive("c", 1.0)
    assert (order.monitor.n, order.waiting, order.in_use) == (0, 3, True)
    for again in ("a", "c"):
        with pytest.raises(ValueError, match="each has one loss"):
            order.arrive(again, 0.0)
    order.arrive("b", 0.0)
    order.expect("d")
    order.give_up("d")
    again = RequestOrder(Monitor(0.05))
    again.restore(type(order.state()).model_validate_json(order.state().model_dump_json()))
    for each in (order, again):
        for request in "bacd":
            with pytest.raises(ValueError, match="came before"):
                each.expect(request)
        each.arrive("d", 1.0)  # too late, once
        assert each.too_late == 1
        with pytest.raises(ValueError, match="each has one loss"):
            each.arrive("d", 1.0)
        each.arrive(1, 0.0)  # a log from before has numbers
        with refused("request"):
            each.arrive(1, 0.0)


def test_request_ids_ascend_and_differ_between_processes_and_threads():
    ids, lock = [], threading.Lock()

    def work():
        for _ in range(50):
            taken = request_ids(7)
            assert taken == sorted(taken)
            with lock:
                ids.extend(taken)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ids)) == len(ids) == 4 * 50 * 7
    assert request_ids(1)[0] > max(ids)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        others = [each for part in pool.map(request_ids, [5] * 20) for each in part]
    assert len({*others, *ids, *request_ids(3)}) == len(others) + len(ids) + 3


def test_numbers_of_numpy_are_kept_in_a_state():
    order = RequestOrder(Monitor(0.05))
    for request in np.arange(3):
        order.expect(request)
    order.give_up(np.int64(2))
    assert type(order.state().last) is int
    assert order.state().given_up_requests == (2,)


def test_requests_given_up_long_ago_are_forgotten_but_never_silently(monkeypatch):
    monkeypatch.setattr("swiftsure.monitor.order.REMEMBERED", 3)
    order = RequestOrder(Monitor(0.05), patience=1)
    for request in range(6):
        order.expect(request)
    assert order.given_up == 5
    assert order.state().given_up_requests == (2, 3, 4)
    for forgotten in (0, 1):
        assert_out_of_order(order, forgotten, words="one of 2 requests that were given up")
    with pytest.raises(ValueError, match="one of 2 requests that were given up"):
        order.give_up(0)
    order.arrive(3, 1.0)
    assert order.too_late == 1
    assert_out_of_order(order, 3)


def test_the_state_stays_small_however_many_are_given_up(tmp_path):
    watch = Watch(Monitor(0.05), patience=1)
    for request in range(100_500):
        watch.order.expect(10**8 + request)
    path = tmp_path / "state.json"
    watch.save(path)
    assert len(watch.order.state().given_up_requests) == 100_000
    assert path.stat().st_size < 2e6
    assert Watch.load(path).order.state() == watch.order.state()


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.sampled_from(["expect", "arrive", "give_up", "restart"]), st.integers(0, 8)),
        max_size=40,
    ),
    st.sampled_from(["lowest", "skip"]),
    st.sampled_from([None, 1, 3]),
)
def test_no_loss_disappears(steps, missing, patience):
    """Each loss is folded, waits, or was of a request given up; one per request, or an error."""
    order = RequestOrder(Monitor(0.05), patience=patience, missing=missing)
    announced, losses_of = set(), {}
    for step, request in steps:
        if step == "restart":
            again = RequestOrder(order.monitor, patience=patience, missing=missing)
            again.restore(type(order.state()).model_validate_json(order.state().model_dump_json()))
            assert again.state() == order.state()
            order = again
            continue
        late = bool(announced) and request <= max(announced)
        before = everything(order)
        try:
            order.arrive(request, 1.0) if step == "arrive" else getattr(order, step)(request)
        except ValueError:
            assert everything(order) == before
            continue
        if step == "arrive":
            assert request in announced or not late
            assert request not in losses_of
            losses_of[request] = order.too_late
        if step == "give_up":
            assert request in announced
        announced.add(request)
    known = sum(loss == 1.0 for _, loss in order.state().line)
    folded = round(order.monitor.mean * order.monitor.n) if order.monitor.n else 0
    assert len(losses_of) == folded + known + order.too_late
    counted = order.monitor.n + order.waiting
    assert len(announced) == counted + (order.given_up if missing == "skip" else 0)


# ------------------------------------------------------------------------------------------- drift


def test_no_warning_while_requests_are_like_the_calibration(policy, record):
    confidences = record.confidences["top1"]
    drift = Drift(policy, confidences=confidences[:, 0])
    rng = np.random.default_rng(0)
    exits = policy.exits(confidences)
    for row in rng.integers(0, record.n, 5000):
        drift.update(exit=int(exits[row]), confidence=float(confidences[row, 0]))
    assert drift.warnings() == []
    full, here = policy.certificate.costs.means["exit"]
    assert drift.saving == pytest.approx(1 - here / full, abs=0.05)


def test_falling_savings_and_other_confidences_are_noticed(policy, record):
    confidences = record.confidences["top1"][:, 0]
    drift = Drift(policy, confidences=confidences)
    for k in range(1000):
        drift.update(exit=3, confidence=float(confidences[k % 800]) ** 2)
    savings, exits, scores = drift.warnings()
    assert "save 0 % of exits" in savings
    assert "other exits" in exits
    assert "other confidences" in scores


def test_costs_in_the_policy_s_unit(policy):
    drift = Drift(policy, cost="flops")
    for _ in range(600):
        drift.update(exit=0, cost=4.5)
    assert drift.saving == pytest.approx(0.1)
    assert "of flops" in drift.warnings()[0]
    with refused("cost"):
        Drift(policy, cost="flop")


@pytest.mark.parametrize(
    "request_",
    [{"exit": 4}, {"exit": -1}, {"exit": 0.5}, {"cost": np.nan}, {"confidence": np.nan}],
)
def test_bad_requests_are_refused(policy, request_):
    drift = Drift(policy)
    before = drift.state()
    with refused(next(iter(request_))):
        drift.update(**{"exit": 1, "confidence": 0.5, **request_})
    assert drift.state() == before


def test_too_few_requests_say_nothing(policy):
    drift = Drift(policy)
    for _ in range(100):
        drift.update(exit=3)
    assert drift.warnings() == []
    assert drift.saving is None


# ------------------------------------------------------------------------------------------- watch


def lines(*contents):
    return b"".join(json.dumps(content).encode() + b"\n" for content in contents)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 400), max_size=6), st.integers(0, 3))
def test_bytes_may_come_in_any_pieces(cuts, seed):
    stream = losses(30, 0.3, seed)
    data = lines(*({"loss": value, "id": k} for k, value in enumerate(stream)))
    watch, start = Watch(Monitor(0.2)), 0
    for cut in [*sorted(cuts), len(data)]:
        watch.feed(data[start:cut])
        start = max(start, cut)
    twin = Monitor(0.2)
    twin.update_many(stream)
    assert watch.monitor.state() == twin.state()
    assert watch.offset == len(data)


def test_lines_of_every_kind():
    watch = Watch(Monitor(0.2))
    watch.feed(lines(0, 0.5, {"loss": 1}, {"exit": 2}, {"loss": None, "cost": 3.0}) + b"\n \r\n")
    assert watch.monitor.n == 3
    assert watch.unreadable == 0
    watch.feed(b'{"loss": 0.\n' + lines({"loss": 0}, {"loss": True}))
    assert watch.monitor.n == 5
    assert watch.monitor.mean == pytest.approx(2.5 / 5)
    assert (watch.unreadable, watch.requests) == (1, 8)


WHOLE = r'{"loss": -1.5e-1, "id": 7, "no\te\u00e9": "a\\ \"b", "x": [true, {"y": null}], "z": "é"}'


@pytest.mark.parametrize("end", range(1, len(WHOLE.encode())))
def test_every_beginning_of_an_object_is_known_as_cut(end):
    watch = Watch(Monitor(0.2, loss_range=(-1, 1)))
    watch.feed(WHOLE.encode()[:end] + b"\n")
    assert (watch.unreadable, watch.monitor.n) == (1, 0)


def test_most_lines_cut_short_are_too_many():
    watch = Watch(Monitor(0.2))
    watch.feed(b'{"loss": 0}\n{"lo\n')
    assert not watch.mostly_unreadable
    watch.feed(b'{"lo\n')
    assert watch.mostly_unreadable


def test_what_is_no_lines_at_all_is_refused():
    with refused("stream"):
        Watch(Monitor(0.2)).feed(b"\0" * 2**21)


@pytest.mark.parametrize(
    "line",
    [
        b'{"loss": 1.5}',
        b"NaN",
        b'{"loss": Infinity}',
        b'{"loss": "0"}',
        b"nan",
        b"inf",
        b"-inf",
        b'{"loss": nan}',
        b'{"losss": 1}',
        b"{}",
        b"[1]",
        b'"1"',
        b"true",
        b"null",
        b"rubbish",
        b"0.",
        b"0 1",
        b'{"loss": 1} {"loss": 1}',
        b'{"lo{"loss": 1}',
        b"{'loss': 1}",
        b'{"loss": 1]',
        b"[" * 100_000,
        b"\0\0",
        b'{"loss": [1]}',
        b"-1e400",
        b"1" + b"0" * 400,
        b'{"loss": 0, "id": ""}',
        b'{"loss": 0, "id": 1.5}',
    ],
)
def test_a_fault_stops_before_its_line(line):
    watch = Watch(Monitor(0.2))
    good = lines({"loss": 0}, {"loss": 1})
    with pytest.raises(StreamFaultError, match="line 3 of the stream"):
        watch.feed(good + line + b"\n" + lines({"loss": 1}))
    assert (watch.monitor.n, watch.lines, watch.offset) == (2, 2, len(good))
    with pytest.raises(StreamFaultError, match="line 3"):
        watch.feed(b"")


def test_an_id_used_twice_is_a_fault():
    watch = Watch(Monitor(0.2))
    with pytest.raises(StreamFaultError, match=r"line 2.*each has one loss"):
        watch.feed(lines({"id": 1, "loss": 0}, {"id": 1, "loss": 1}))
    with pytest.raises(StreamFaultError, match="all losses have one or none"):
        Watch(Monitor(0.2)).feed(lines({"id": 1}, {"loss": 1}))


@pytest.mark.parametrize(
    "odd", [{"exit": 99}, {"exit": "a"}, {"confidence": [1]}, {"cost": float("nan")}]
)
def test_what_only_warnings_need_does_not_stop_a_loss(policy, tmp_path, odd):
    watch = Watch(Monitor.from_policy(policy), Drift(policy))
    before = watch.drift.state()
    watch.feed(lines({"loss": 1, "confidence": 0.5, "exit": 1, **odd}))
    assert (watch.monitor.n, watch.odd) == (1, 1)
    assert watch.drift.state() == before
    watch.save(tmp_path / "state.json")
    assert Watch.load(tmp_path / "state.json").odd == 1


def test_the_last_line_may_lack_its_break():
    whole, cut, number = (Watch(Monitor(0.2)) for _ in range(3))
    whole.feed(b'{"loss": 0}\n{"loss": 1}')
    assert whole.finish() is False
    assert (whole.monitor.n, whole.offset) == (2, 23)
    cut.feed(b'{"loss": 0}\n{"loss": 0.')
    assert cut.finish() is True
    assert (cut.monitor.n, cut.offset) == (1, 12)
    number.feed(b"0\n0.1")  # perhaps of 0.15
    assert number.finish() is True
    assert number.monitor.n == 1


@settings(max_examples=30)
@given(st.lists(st.integers(0, 1200), min_size=1, max_size=5))
def test_a_watch_goes_on_where_it_was(tmp_path_factory, cuts):
    """Killed anywhere, also in the middle of a line, it folds each line once."""
    folder = tmp_path_factory.mktemp("watch")
    stream = losses(40, 0.3)
    data = lines(*({"loss": value} for value in stream))
    file, state = folder / "stream.jsonl", folder / "state.json"
    watch = Watch(Monitor(0.2))
    for cut in [*sorted(cuts), len(data)]:
        file.write_bytes(data[:cut])
        with file.open("rb") as opened:
            watch.resume(opened)
            watch.feed(opened.read())
        watch.save(state)
        watch = Watch.load(state)
    twin = Monitor(0.2)
    twin.update_many(stream)
    assert watch.monitor.state() == twin.state()


def test_a_replaced_file_is_noticed(tmp_path):
    state = tmp_path / "state.json"
    watch = Watch(Monitor(0.2))
    old = lines(*({"loss": value} for value in losses(100)))
    watch.resume(io.BytesIO(old))
    watch.feed(old)
    watch.save(state)
    for other in (old[:50], lines(*({"loss": value} for value in losses(200, 0.5, 3))), b""):
        with pytest.raises(ValueError, match="not the file that was read before"):
            Watch.load(state).resume(io.BytesIO(other))
    again = Watch.load(state)
    again.restart()
    again.resume(io.BytesIO(lines({"loss": 0})))
    assert again.offset == 0
    assert again.monitor.n == 100


def in_file(path, data, state=None, *, start=False):
    """Read a file that holds some bytes from where a state says."""
    path.write_bytes(data)
    watch = Watch(Monitor(0.2)) if state is None or not state.exists() else Watch.load(state)
    with path.open("rb") as file:
        if start:
            watch.restart(file)
        watch.resume(file)
        watch.feed(file.read())
        watch.finish()
    if state is not None:
        watch.save(state)
    return watch


@pytest.mark.parametrize("n", [1, 42, 43, 60, 341, 342, 500])
def test_a_last_line_without_its_break_is_found_again(tmp_path, n):
    path, state = tmp_path / "stream.jsonl", tmp_path / "state.json"
    data = b'{"loss": 0}\n' * n
    in_file(path, data[:-1], state)
    again = in_file(path, data + b'{"loss": 1}\n', state)
    assert (again.monitor.n, again.lines) == (n + 1, n + 1)


def test_a_file_with_another_beginning_is_noticed(tmp_path):
    path, state = tmp_path / "stream.jsonl", tmp_path / "state.json"
    same = b'{"loss": 0}\n' * 1000
    in_file(path, b'{"loss": 1}\n' + same, state)
    with pytest.raises(ValueError, match="not the file that was read before"):
        in_file(path, b'{"loss": 0}\n' + same, state)


@pytest.mark.parametrize("n", [1, 10, 1000])
def test_a_new_file_of_the_same_lines_is_noticed(tmp_path, n):
    path, state = tmp_path / "stream.jsonl", tmp_path / "state.json"
    in_file(path, b'{"loss": 0}\n' * n, state)
    path.rename(tmp_path / "old.jsonl")
    longer = b'{"loss": 0}\n' * (2 * n)
    with pytest.raises(ValueError, match="its lines are the same"):
        in_file(path, longer, state)
    assert in_file(path, longer, state, start=True).monitor.n == 3 * n


def test_a_copy_of_the_file_is_known_by_its_lines(tmp_path):
    path, state = tmp_path / "stream.jsonl", tmp_path / "state.json"
    data = lines(*({"loss": value} for value in losses(100, 0.3)))
    in_file(path, data, state)
    path.rename(tmp_path / "old.jsonl")
    assert in_file(path, data + lines({"loss": 0}), state).monitor.n == 101


def test_the_same_file_is_not_read_from_its_start_again(tmp_path):
    path, state = tmp_path / "stream.jsonl", tmp_path / "state.json"
    data = lines(*({"loss": value} for value in losses(100)))
    in_file(path, data, state)
    with pytest.raises(ValueError, match="leave out --from-start"):
        in_file(path, data + data, state, start=True)
    assert in_file(path, data[:-12], state, start=True).monitor.n == 199  # it is shorter: a new one


def test_rules_for_late_losses_are_kept_and_compared(tmp_path):
    state = tmp_path / "state.json"
    watch = Watch(Monitor(0.2), patience=3, missing="skip")
    watch.feed(lines({"id": 1}))
    watch.save(state)
    again = Watch.load(state)
    assert (again.order.patience, again.order.missing) == (3, "skip")
    assert Watch.load(state, patience=3, missing="skip").order.state() == watch.order.state()
    with refused("patience"):
        Watch.load(state, patience=4)
    with refused("missing"):
        Watch.load(state, missing="lowest")


def test_states_of_before_are_read(tmp_path):
    """They do not say all that newer ones do."""
    from swiftsure._lib.files import json_checksum

    path, state = tmp_path / "stream.jsonl", tmp_path / "state.json"
    data = lines(*({"loss": value} for value in losses(100)))
    in_file(path, data + b'{"lo\n', state)
    content = json.loads(state.read_text())
    for part, names in {
        "stream": ["head", "inode", "requests", "odd"],
        "order": ["patience", "missing"],
    }.items():
        for name in names:
            del content[part][name]
    parts = {k: content[k] for k in ("monitor", "order", "stream")}
    content["checksum"] = json_checksum(parts)
    state.write_text(json.dumps(content))
    watch = Watch.load(state, patience=5)
    assert watch.order.patience == 5
    assert not watch.mostly_unreadable
    with path.open("rb") as file:
        watch.resume(file)


def with_order(state, **changes):
    """Change the order's part of a state file, None taking a field away, with a fresh checksum."""
    from swiftsure._lib.files import json_checksum

    content = json.loads(state.read_text())
    order = {**content["order"], **changes}
    content["order"] = {name: value for name, value in order.items() if value is not None}
    parts = {k: v for k, v in content.items() if k not in ("format", "version", "checksum")}
    content["checksum"] = json_checksum(parts)
    state.write_text(json.dumps(content))


@pytest.fixture(params=["lowest", "skip"])
def late_state(tmp_path, request):
    """The state after requests 1, 2 and 5, of which the first was given up."""
    watch = Watch(Monitor(0.2), patience=1, missing=request.param)
    watch.feed(lines({"id": 1}, {"id": 2, "loss": 0}, {"id": 5, "loss": 0}))
    watch.save(tmp_path / "state.json")
    return tmp_path / "state.json"


def test_a_restart_remembers_what_was_given_up(late_state):
    watch = Watch.load(late_state)
    for line in ({"id": 2, "loss": 1}, {"id": 4, "loss": 1}):  # a second one, and not announced
        with pytest.raises(StreamFaultError, match="each has one loss"):
            Watch.load(late_state).feed(lines(line))
    watch.feed(lines({"id": 1, "loss": 1}))
    assert (watch.order.given_up, watch.order.too_late) == (1, 1)
    watch.save(late_state)
    with pytest.raises(StreamFaultError, match="each has one loss"):
        Watch.load(late_state).feed(lines({"id": 1, "loss": 1}))


@pytest.mark.parametrize("announced", [True, False])
def test_numbers_that_start_again_after_a_restart_are_a_fault(late_state, announced):
    """A service that counts from 0 again would have its losses dropped up to the old number."""
    watch = Watch.load(late_state)
    first = [{"id": 0}, {"id": 0, "loss": 1}] if announced else [{"id": 0, "loss": 1}]
    with pytest.raises(StreamFaultError, match=r"line 1 of the stream.*must be above 5"):
        watch.feed(lines(*first))


def test_a_state_of_before_does_not_know_which_requests_were_given_up(late_state):
    """So a late loss may be of any request, and is refused."""
    with_order(late_state, given_up_requests=None)
    watch = Watch.load(late_state)
    assert watch.order.given_up == 1
    for request in (1, 2):
        with pytest.raises(StreamFaultError, match="states of earlier versions remember none"):
            Watch.load(late_state).feed(lines({"id": request, "loss": 1}))
    watch.feed(lines({"id": 6}, {"id": 7, "loss": 0}, {"id": 6, "loss": 0}))
    assert watch.order.waiting == 0


def test_a_state_of_before_that_dropped_other_losses_is_refused(late_state):
    with_order(late_state, given_up_requests=None, too_late=2)
    with pytest.raises(ValueError, match=r"damaged monitor state .*: 2 losses .*void"):
        Watch.load(late_state)


@pytest.mark.parametrize(
    "changes",
    [
        {"given_up_requests": [1, 1], "given_up": 2},
        {"given_up_requests": [1, 2]},
        {"given_up_requests": [6]},
        {"given_up_requests": [-1]},
        {"given_up_requests": [3], "line": [[3, None]]},
        {"line": [[3, 0.0], [3, 1.0]]},
        {"line": [[4, 0.0], [3, 1.0]]},
        {"line": [[6, 0.0]]},
    ],
)
def test_an_order_that_cannot_be_is_refused(late_state, changes):
    with_order(late_state, **changes)
    with pytest.raises(ValueError, match=r"damaged monitor state .*: (a request|requests|\d)"):
        Watch.load(late_state)


def test_what_waits_and_drifts_is_restored_too(tmp_path, policy):
    state = tmp_path / "state.json"
    watch = Watch(Monitor.from_policy(policy), Drift(policy))
    watch.feed(lines({"id": 1, "exit": 0}, {"id": 2, "loss": 1, "exit": 3}))
    watch.save(state)
    again = Watch.load(state, Drift(policy))
    assert again.order.state() == watch.order.state()
    assert again.drift.state() == watch.drift.state()
    again.feed(lines({"id": 1, "loss": 0}))
    assert again.monitor.n == 2
    Watch.load(state).save(state)  # without a policy nothing is forgotten
    assert Watch.load(state, Drift(policy)).drift.state() == watch.drift.state()
    other = Drift(policy, confidences=[0.1, 0.5, 0.9])
    Watch.load(state, other)  # what was not seen before starts anew
    assert other.state().exits == watch.drift.state().exits


# ------------------------------------------------------------------------- threads and two writers


def test_threads_lose_no_loss():
    monitor, losses = Monitor(0.5, 1e-9), np.full(1_000, 0.25)

    def work():
        for _ in range(50):
            monitor.update_many(losses)
            monitor.update(0.25)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert monitor.n == 8 * 50 * 1_001
    alone = Monitor(0.5, 1e-9)
    alone.update_many(np.full(monitor.n, 0.25))
    assert monitor.state() == alone.state()


def test_threads_may_share_an_order():
    order = RequestOrder(Monitor(0.5, 1e-9))
    for request in range(8_000):
        order.expect(request)

    def work(part):
        for request in part:
            order.arrive(int(request), 0.25)

    parts = np.random.default_rng(0).permutation(8_000).reshape(8, -1)
    threads = [threading.Thread(target=work, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (order.monitor.n, order.waiting) == (8_000, 0)


def test_a_monitor_can_be_copied():
    monitor = Monitor(0.05)
    monitor.update_many([0.0, 1.0, 0.0])
    other = copy.deepcopy(monitor)
    assert other.state() == monitor.state()
    other.update(1.0)
    assert (other.n, monitor.n) == (4, 3)


def test_a_second_writer_cannot_erase_an_alarm(tmp_path):
    path = tmp_path / "state.json"
    Monitor(0.05).save(path)
    first, second = Monitor.load(path), Monitor.load(path)
    assert first.update_many([1.0] * 50)
    first.save(path)
    second.update(0.0)
    with pytest.raises(ValueError, match="another monitor, which raised an alarm"):
        second.save(path)
    with pytest.raises(ValueError, match="another monitor, which raised an alarm"):
        Monitor(0.05).save(path)
    assert Monitor.load(path).alarm
    first.update(0.0)
    first.save(path)  # the one that wrote it goes on
    assert Monitor.load(path).n == 51


def test_a_second_writer_loses_no_update(tmp_path):
    path = tmp_path / "state.json"
    Watch(Monitor(0.05)).save(path)
    first, second = Watch.load(path), Watch.load(path)
    first.feed(b'{"loss": 0}\n')
    first.save(path)
    second.feed(b'{"loss": 1}\n')
    with pytest.raises(ValueError, match="was written by another monitor; it was left"):
        second.save(path)
    assert Watch.load(path).monitor.mean == 0.0


def test_a_monitor_does_not_strip_the_state_of_a_watch(tmp_path):
    path = tmp_path / "state.json"
    watch = Watch(Monitor(0.05))
    watch.feed(b'{"id": 1}\n')
    watch.save(path)
    before = path.read_bytes()
    monitor = Monitor.load(path)
    with pytest.raises(ValueError, match=r"holds more than a monitor: order, stream"):
        monitor.save(path)
    assert path.read_bytes() == before


def test_a_monitor_may_be_saved_in_two_places(tmp_path):
    monitor = Monitor(0.05)
    for name in ("a.json", "b.json", "a.json"):
        monitor.update(0.0)
        monitor.save(tmp_path / name)
    assert Monitor.load(tmp_path / "a.json").n == 3


def test_a_key_twice_is_a_fault():
    with pytest.raises(StreamFaultError, match="has a key twice"):
        Watch(Monitor(0.05)).feed(b'{"loss": 1, "loss": 0}\n')


# ------------------------------------------------------------------------- promises of policies


def test_a_monitor_of_a_tail_counts_the_losses_above_its_limit(record):
    policy = ss.calibrate(record, ss.Promise("brier", above=0.3, epsilon=0.1))
    monitor = Monitor.from_policy(policy)
    plain = Monitor(0.1)
    values = np.random.default_rng(0).uniform(-1, 1, 500)
    for value in values[:100]:
        assert monitor.update(value) == plain.update(value > 0.3)
    monitor.update_many(values[100:])
    plain.update_many(values[100:] > 0.3)
    assert monitor.evidence == plain.evidence
    assert Monitor.from_state(monitor.state()).state() == monitor.state()
    assert "share of losses above 0.3" in str(monitor)
    with pytest.raises(ValueError, match=r"NaN|lie in"):
        monitor.update(float("nan"))


def test_a_monitor_sees_production_without_weights(record):
    """Weighted losses go up to 1.6, those of production up to 1."""
    names = np.where(np.arange(record.n) % 2, "a", "b")
    weighted = record.sliced(names).weighted({"a": 1.6, "b": 0.4}, max_weight=1.6)
    for promise in (
        ss.Promise("zero_one", epsilon=0.1),
        ss.Promise("zero_one", epsilon=0.1, within="slices"),
        ss.Promise("zero_one", epsilon=0.1, within="each slice"),
        ss.Promise("zero_one", epsilon=0.1, among="exits"),
    ):
        policy = ss.calibrate(weighted, promise)
        one = policy["a"] if promise.within == "each slice" else policy
        assert Monitor.from_policy(one).loss_range == ss.LossRange(-1.0, 1.0)


def test_promises_that_share_their_loss_are_told_apart_by_number(record):
    exits = ss.Promise("zero_one", epsilon=0.1, among="exits")
    policy = ss.calibrate(record, [ss.Promise("zero_one", epsilon=0.05), exits])
    assert Monitor.from_policy(policy, number=1).epsilon == 0.1
    with refused("number"):
        Monitor.from_policy(policy)
    with refused("number"):
        Monitor.from_policy(policy, number=2)


def test_a_worst_share_cannot_be_watched(record):
    policy = ss.calibrate(record, ss.Promise("brier", worst=0.1, epsilon=0.5))
    with pytest.raises(ValueError, match="worst share cannot be watched"):
        Monitor.from_policy(policy)
