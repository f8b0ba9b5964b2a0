"""A calibration that grows: what is added, what is read, and what is kept in its file."""

import subprocess
import sys
import textwrap
import time
from dataclasses import replace

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.certify.anytime.log import GrowthLog
from swiftsure.study.simulate import Population
from tests.builders import refused, request_of

POPULATION = Population(n_exits=4, overconfidence=2.5)
PATH = ss.Path.logit_grid(step=0.25)
OPTIONS = {"epsilon": 0.05, "loss": "zero_one", "horizon": 400, "path": PATH}


def started(state=None, **given):
    """A calibration that grows, given the fields of a promise and its request, and a horizon."""
    horizon = {"horizon": given.pop("horizon")} if "horizon" in given else {}
    return request_of(**given).start(state=state, **horizon)


def draw(n, seed, groups=None, **arguments):
    sample = POPULATION.sample(n, seed)
    costs = {"flops": np.random.default_rng(seed).uniform(1, 2, (n, 4)).cumsum(axis=1)}
    record = ss.ExitRecord.from_logits(sample.logits, sample.labels, costs=costs, **arguments)
    return record if groups is None else record.grouped(groups)


def grown(records, **changes):
    calibration = started(**(OPTIONS | changes))
    for record in records:
        calibration.update(record)
    return calibration


def test_updates_of_any_size_give_the_same():
    """The bets see sample after sample, so it does not matter how these are cut into updates."""
    whole = replace(draw(300, 0), order=0)
    order = whole.curve(loss="zero_one").rows_in_order(0)
    single = [replace(whole.take([row]), order=0) for row in order]
    at_once, one_by_one = grown([whole]), started(**OPTIONS)
    looks = []
    for record in single:
        one_by_one.update(record)
        looks.append(one_by_one.index or 0)
    assert at_once.index == one_by_one.index is not None
    assert looks == sorted(looks)  # what is certified stays certified
    assert at_once.policy().certificate.promises == one_by_one.policy().certificate.promises


def test_the_bets_are_those_of_their_definition():
    """STaR for a horizon that doubles, with at most 0.9 of the largest stake, written plainly."""
    losses = np.random.default_rng(0).choice([1.0, -1.0, 0.0], 900, p=[0.05, 0.02, 0.93])
    record = ss.ThresholdRecord(
        [1.0, 0.5],
        losses={"gain": np.column_stack([np.zeros(900), losses])},
        loss_ranges={"gain": (-1, 1)},
        order=0,
    )
    order = record.curve().rows_in_order(0)
    epsilon, delta = 0.06, 0.1

    def certified_at(horizon):
        wealth, total, squares = 1.0, 0.0, 1.0
        for i, loss in enumerate(losses[order]):
            until = horizon
            while until <= i:
                until *= 2
            left = max(until - i, 0.1 * until)
            aim = -np.log(delta * wealth)
            stake = min(0.9 / (2 - epsilon), np.sqrt(2 * aim * (i + 1) / (left * squares)))
            wealth *= 1 - stake * (loss - epsilon)
            if wealth >= 1 / delta:
                return i + 1
            total += loss
            squares += (loss - (1.0 + total) / (i + 2)) ** 2
        return None

    for horizon in (50, 300, 2000):
        expected = certified_at(horizon)
        calibration = started(epsilon=epsilon, delta=delta, horizon=horizon)
        found = None
        for i, row in enumerate(order):
            calibration.update(replace(record.take([row]), order=0))
            if calibration.index is not None and found is None:
                found = i + 1
                break
        assert found == expected


def test_the_policy_holds_all_samples_and_its_words():
    records = [draw(200, seed) for seed in range(3)]
    policy = grown(records).policy({"name": "grown"})
    certificate = policy.certificate
    assert (certificate.samples.n, certificate.samples.labels, certificate.samples.horizon) == (
        600,
        600,
        400,
    )
    joined = ss.ExitRecord.concatenate(
        [replace(r, ids=r.ids + 200 * k, order=1) for k, r in enumerate(records)]
    )
    curve = joined.curve(loss="zero_one", path=PATH)
    assert certificate.promises[0].calibration_risk == pytest.approx(
        curve.risk_at(certificate.index)
    )
    full, here = certificate.costs.means["flops"]
    assert here == pytest.approx(curve.mean_cost("flops")[certificate.index])
    assert full == pytest.approx(curve.full_cost("flops"))
    text = str(policy)
    assert "at every moment of a calibration that may grow for ever (600 samples so far)" in text
    assert "samples were added in an order that does not depend on their losses, each" in text
    assert "ε, δ, horizon and method were fixed before any calibration loss was seen" in text
    assert "the number of calibration" not in text  # it need not be fixed
    given = grown([replace(draw(200, 0), order=7)]).policy()
    assert "drawn at random" not in str(given)


def test_a_policy_that_grew_is_saved_and_loaded(tmp_path):
    policy = grown([draw(400, 0)]).policy()
    policy.save(tmp_path / "policy.json")
    assert ss.Policy.load(tmp_path / "policy.json") == policy


def test_missing_labels_are_a_condition_whichever_update_had_them():
    labels = POPULATION.sample(200, 1).labels.copy()
    labels[:20] = -1
    records = [draw(200, 0), ss.ExitRecord.from_logits(POPULATION.sample(200, 1).logits, labels)]
    records = [replace(r, costs={}, losses={"zero_one": r.losses["zero_one"]}) for r in records]
    policy = grown(records, missing="worst").policy()
    assert "whether a sample's label is missing depends on that sample alone" in str(policy)
    assert policy.certificate.samples.labels == 380


def test_several_risks_and_other_systems():
    promises = [
        ss.Promise("zero_one", epsilon=0.05),
        ss.Promise("brier", risk="consistency", epsilon=0.1),
    ]

    def of(*asked):
        calibration = ss.Calibration(asked, path=PATH).start(400)
        calibration.update(draw(400, 0))
        return calibration

    both, alone = of(*promises), [of(promise) for promise in promises]
    for each in (both, *alone):
        assert each.index is not None
    assert both.index <= min(each.index for each in alone) + 1  # another order of samples
    losses = np.column_stack([np.zeros(300), np.full(300, 0.01)])
    record = ss.ThresholdRecord([1.0, 0.5], losses={"rouge_l": losses}, costs={"layers": [4, 2]})
    policy = grown([record], loss="rouge_l", path=None, horizon=300).policy()
    assert (policy.threshold, policy.n_exits) == (0.5, None)


def test_groups_are_units_and_must_be_whole():
    first = draw(300, 0).grouped(np.repeat(np.arange(100), 3))
    second = draw(300, 1).grouped(np.repeat(np.arange(100), 3) + 100)
    calibration = grown([first, second], epsilon=0.1)
    certificate = calibration.policy().certificate
    assert (certificate.samples.n, certificate.samples.n_samples, certificate.samples.unit) == (
        200,
        600,
        "groups",
    )
    with refused("record"):
        calibration.update(draw(3, 2).grouped([7, 7, 7]))


def test_samples_must_be_new_and_of_the_same_model():
    record = draw(100, 0)
    calibration = grown([record])
    with pytest.raises(ValueError, match="`record` was added before"):
        calibration.update(record)
    calibration.update(draw(2, 3, ids=["a", "b"]))
    with pytest.raises(ValueError, match="new samples, but b was added before"):
        calibration.update(draw(2, 4, ids=["b", "c"]))
    with refused("record"):
        calibration.update(replace(draw(5, 5), fingerprint="another"))
    with refused("record"):
        calibration.update(record.curve(loss="zero_one"))
    assert calibration.n == 102


def test_what_does_not_go_with_growing_is_refused():
    for wrong, name in (
        ({"path": "breakpoints"}, "path"),
        ({"missing": "stop"}, "missing"),
        ({"horizon": 0}, "horizon"),
        ({"delta": 1.0}, "delta"),
    ):
        with refused(name):
            started(**(OPTIONS | wrong))
    for wrong in ({"control": "crc"}, {"control": "ltt"}, {"bound": "wsr"}):
        with refused("control"):
            started(**(OPTIONS | wrong))
    assert started(**OPTIONS, bound="star").n == 0
    with refused("path"):
        started(**(OPTIONS | {"path": ss.Path.learn(100)}))
    with pytest.raises(ValueError, match="CostPromise has no test here"):
        request_of(ss.CostPromise("flops", at_most=3), epsilon=0.1).start()
    with pytest.raises(ValueError, match="needs a calibration of its own in each slice"):
        started(**OPTIONS, within="each slice")
    with pytest.raises(ValueError, match="finite population cannot grow"):
        grown([draw(10, 0).drawn_from(100)])
    with refused("policy"):
        started(**OPTIONS).policy()
    with refused("epsilon"):
        grown([draw(10, 0)], epsilon=1.5)


# --------------------------------------------------------------------------------- the state file


def test_the_state_goes_on_where_it_was(tmp_path):
    state = tmp_path / "growing.state"
    records = [draw(150, seed) for seed in range(4)]
    for record in records:  # a new process each time
        started(**OPTIONS, state=state).update(record)
    again = started(**OPTIONS, state=state)
    assert again.has(records[2])
    assert again.policy() == grown(records).policy()
    with pytest.raises(ValueError, match="`record` was added before"):
        again.update(records[1])
    for changes in ({"epsilon": 0.06}, {"delta": 0.2}, {"horizon": 500}, {"path": None}):
        with pytest.raises(ValueError, match=r"growing.state was started with"):
            started(**(OPTIONS | changes), state=state)


def test_a_file_that_was_cut_anywhere_holds_whole_updates(tmp_path):
    """A killed process leaves the beginning of an update, which counts as none at all."""
    state = tmp_path / "growing.state"
    grown([draw(3, seed) for seed in range(2)], state=state)
    short = state.stat().st_size
    grown([draw(3, 9)], state=state)
    content = state.read_bytes()
    for length in [*range(short, len(content), 37), len(content) - 1]:
        state.write_bytes(content[:length])
        calibration = started(**OPTIONS, state=state)
        assert calibration.n == 6
    calibration.update(draw(4, 5))  # which overwrites the rest
    assert started(**OPTIONS, state=state).n == 10


def test_a_damaged_file_is_refused_and_left(tmp_path):
    state = tmp_path / "growing.state"
    grown([draw(20, seed) for seed in range(3)], state=state)
    content = bytearray(state.read_bytes())
    for position in (60, len(content) // 2, len(content) - 5):
        broken = bytearray(content)
        broken[position] ^= 1
        state.write_bytes(broken)
        with pytest.raises(ValueError, match="damaged calibration state"):
            started(**OPTIONS, state=state)
        assert state.read_bytes() == broken
    state.write_text("{}")
    with pytest.raises(ValueError, match="is not the state of a Swiftsure calibration"):
        started(**OPTIONS, state=state)


def test_a_damaged_length_does_not_hide_the_updates_after_it(tmp_path):
    """A longer length must not look like an update that a killed process left unfinished."""
    state = tmp_path / "growing.state"
    grown([draw(20, seed) for seed in range(3)], state=state)
    content = state.read_bytes()
    for at in (start for start in range(len(content)) if content.startswith(b'"bytes": ', start)):
        broken = content[: at + 9] + b"9" + content[at + 10 :]
        state.write_bytes(broken)
        if broken != content:
            with pytest.raises(ValueError, match="damaged calibration state"):
                started(**OPTIONS, state=state)


def test_an_update_that_is_refused_leaves_the_state_alone(tmp_path):
    state = tmp_path / "growing.state"
    calibration = grown([draw(20, 0)], state=state)
    content = state.read_bytes()
    with refused("record"):
        calibration.update(draw(20, 1).grouped(np.arange(20) // 2))
    plain = draw(20, 1)
    with pytest.raises(ValueError, match="size"):
        calibration.update(replace(plain, costs={"flops": np.ones(4)}))
    assert state.read_bytes() == content
    losses = {"gain": np.zeros((4, 2))}
    rows = ss.ThresholdRecord([1.0, 0.5], losses=losses, loss_ranges={"gain": (-1, 1)})
    mixed = started(epsilon=0.1)
    mixed.update(rows)
    with refused("record"):  # of the same size, but groups are other units
        mixed.update(replace(rows, groups=[0, 0, 1, 2], ids=np.arange(4, 8), order=None))


@pytest.mark.parametrize(
    ("changes", "data"), [({"n": 4}, None), ({"n": "a"}, None), ({"labels": []}, None), ({}, b"")]
)
def test_updates_that_no_calibration_writes_are_refused(tmp_path, changes, data):
    """Their checksum fits, but not their content."""
    state = tmp_path / "growing.state"
    grown([draw(20, 0)], state=state)
    log = GrowthLog(state)
    facts, kept = log.read()[1]
    log.append(facts | {"key": None} | changes, kept if data is None else data)
    with pytest.raises(ValueError, match="damaged calibration state"):
        started(**OPTIONS, state=state)


def test_two_writers_do_not_mix(tmp_path):
    state = tmp_path / "growing.state"
    one = grown([draw(20, 0)], state=state)
    two = started(**OPTIONS, state=state)
    two.update(draw(20, 1))
    with pytest.raises(ValueError, match="changed by another process"):
        one.update(draw(20, 2))
    assert one.n == 20
    assert len(GrowthLog(state).read()) == 3


def test_kill_9_loses_at_most_the_update_it_was_in(tmp_path):
    program = """
        import sys
        import numpy as np
        import swiftsure as ss
        state, acknowledged = sys.argv[1:]
        calibration = ss.Calibration(ss.Promise(epsilon=0.05)).start(400, state)
        for k in range(10_000):
            losses = np.column_stack([np.zeros(5), np.full(5, k % 50 == 0)]).astype(float)
            calibration.update(ss.ThresholdRecord([1.0, 0.5], losses={"rouge_l": losses}))
            with open(acknowledged, "a") as file:
                print(calibration.n, file=file, flush=True)
    """
    state, told = tmp_path / "growing.state", tmp_path / "told"
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program), str(state), str(told)]
        )
        before = told.stat().st_size if told.exists() else 0
        for _ in range(3000):
            if told.exists() and told.stat().st_size > before + 100:
                break
            time.sleep(0.01)
        process.kill()
        process.wait()
        acknowledged = int(told.read_text().split()[-1])
        calibration = started(epsilon=0.05, horizon=400, state=state)
        assert acknowledged <= calibration.n <= acknowledged + 5
        assert calibration.n % 5 == 0
