"""Records of several dials, their paths, and the policies made from them."""

import json
from dataclasses import replace

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.curves.pareto import pareto_order
from swiftsure.run import PolicyBinding
from swiftsure.study.simulate import Population
from tests.builders import request_of

DIALS = ss.dial_grid(
    {"rollback": [1.0, 2.0, 4.0], "fallback": [0.5, 0.2]}, full={"rollback": 0.0, "fallback": 0.5}
)
RISKS = np.array([0, 0.0, 0.02, 0.04, 0.0, 0.03, 0.1])
COSTS = np.array([1, 0.6, 0.55, 0.5, 0.4, 0.35, 0.3])


def record(n=600, seed=0, **changes):
    losses = (np.random.default_rng(seed).random((n, 7)) < RISKS).astype(float)
    given = {
        "dials": DIALS,
        "inconsistencies": {"mse": losses},
        "costs": {"passes": COSTS},
        "settings": {"scheme": "rollback"},
    }
    return ss.ThresholdRecord(**given | changes)


# ------------------------------------------------------------------------------------ records


def test_a_record_of_dials_is_saved_and_loaded(tmp_path):
    made = record()
    made.save(tmp_path / "dials.parquet")
    found = ss.load_record(tmp_path / "dials.parquet")
    assert found.dials == made.dials == DIALS
    assert found.setting(5) == {"rollback": 2.0, "fallback": 0.2}
    assert found.number_of({"rollback": 2.0, "fallback": 0.2, "scheme": "rollback"}) == 5
    np.testing.assert_array_equal(found.inconsistencies["mse"], made.inconsistencies["mse"])
    np.testing.assert_array_equal(found.thresholds, np.arange(7))


def test_a_record_of_one_dial_has_the_old_file(tmp_path):
    """Older versions of the library read it."""
    import pyarrow.parquet as pq

    ss.ThresholdRecord([None, 0.5], losses={"mse": [[0.0, 0.1]]}).save(tmp_path / "one.parquet")
    header = json.loads(pq.read_schema(tmp_path / "one.parquet").metadata[b"swiftsure"])
    assert header["version"] == 1
    assert "dials" not in header


def test_dials_come_from_an_npz(tmp_path):
    np.savez(
        tmp_path / "dials.npz",
        **{"dials.a": [0, 1], "dials.b": np.array(["x", "y"]), "losses.mse": [[0.0, 0.1]]},
    )
    assert ss.load_record(tmp_path / "dials.npz").dials == {"a": (0, 1), "b": ("x", "y")}


def test_parts_of_a_record_keep_the_dials():
    part, rest = record().split(100)
    assert part.dials == rest.dials == DIALS
    assert ss.ThresholdRecord.concatenate([part, rest]).n == 600


@pytest.mark.parametrize(
    ("dials", "message"),
    [
        ({"a": [0, 1], "b": [0]}, "a has 2, b has 1"),
        ({"a": [0, 1, 1]}, "settings 1 and 2 are both {'a': 1}"),
        ({"a": [0, np.nan]}, "must hold numbers, texts or None, but got nan"),
        ({"a": 3}, "one value per setting"),
        ([1, 2], "must map names to values"),
    ],
)
def test_dials_that_are_no_settings_are_refused(dials, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ss.ThresholdRecord(dials=dials, losses={"mse": [[0.0, 0.1]]})


def test_thresholds_and_dials_exclude_each_other():
    with pytest.raises(ValueError, match="`thresholds` must be left out"):
        record(thresholds=[7, 6, 5, 4, 3, 2, 1])
    with pytest.raises(ValueError, match="`settings` must not hold the dial itself, 'fallback'"):
        record(settings={"fallback": 0.5})


def test_a_grid_has_the_full_model_once():
    grid = ss.dial_grid({"a": [0, 1], "b": [5, 6]}, full={"a": 0, "b": 5})
    assert list(zip(*grid.values(), strict=True)) == [(0, 5), (1, 5), (0, 6), (1, 6)]
    with pytest.raises(ValueError, match="`full` must give the full model's value of every dial"):
        ss.dial_grid({"a": [0], "b": [1]}, full={"a": 0})


def test_true_is_not_one_but_one_is_one_point_zero():
    dials = {"cache": [1, True, False, 0], "steps": [50, 50, 50, 50.5]}
    made = ss.ThresholdRecord(dials=dials, losses={"mse": [[0.0] * 4]})
    numbers = [made.number_of({"cache": v, "steps": 50}) for v in (1, 1.0, True, False)]
    assert numbers == [0, 0, 1, 2]
    with pytest.raises(ValueError, match="must hold the setting cache = 0, steps = 50, but"):
        made.number_of({"cache": 0, "steps": 50})
    assert made.branches(along="steps") == [[1], [2], [3]]
    with pytest.raises(ValueError, match="settings 0 and 1 are both"):
        ss.ThresholdRecord(dials={"a": [1, 1.0]}, losses={"mse": [[0.0, 0.1]]})
    grid = ss.dial_grid({"a": [True, 2]}, full={"a": 1})
    assert grid == {"a": (1, True, 2)}
    assert grid["a"][1] is True


# ------------------------------------------------------------------------ one dial at a time


def one_dial(fallback, values, **changes):
    given = {
        "thresholds": [0.0, 2.0],
        "losses": {"mse": values},
        "costs": {"passes": [1.0, 0.5]},
        "dial": "rollback",
        "settings": {"fallback": fallback, "scheme": "rollback"},
        "order": 0,
    }
    return ss.ThresholdRecord(**given | changes)


def test_records_of_one_dial_become_one_of_several():
    made = ss.ThresholdRecord.across([one_dial(0.5, [[0.1, 0.2]]), one_dial(0.2, [[0.1, 0.3]])])
    assert made.dials == {"rollback": (0.0, 2.0, 2.0), "fallback": (0.5, 0.5, 0.2)}
    assert made.settings == {"scheme": "rollback"}
    assert made.losses["mse"].tolist() == [[0.1, 0.2, 0.3]]
    assert made.costs["passes"].tolist() == [1.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"losses": {"mse": [[0.2, 0.3]]}}, "one full model, but differ in the losses"),
        ({"costs": {"passes": [0.9, 0.5]}}, "one full model, but differ in the costs"),
        ({"fingerprint": "sha256:0"}, "agree in `fingerprint`"),
        ({"ids": [7]}, "same samples, but differ in `ids`"),
        ({"settings": {"fallback": 0.5, "scheme": "rollback"}}, "differ in a setting"),
    ],
)
def test_records_of_different_full_models_are_not_joined(other, message):
    first = one_dial(0.5, [[0.1, 0.2]])
    with pytest.raises(ValueError, match=message):
        ss.ThresholdRecord.across([first, one_dial(0.2, [[0.1, 0.3]], **other)])


# -------------------------------------------------------------------------------------- paths


def test_the_front_leaves_out_what_others_beat():
    path = ss.Path.pareto(record())
    assert path.columns == (0, 4, 5, 6)
    assert "front" in path.kind


def test_order_is_by_harm_not_by_luck():
    """A gap that cancels on the pilot does not come before settings that change nothing."""
    wrong = (np.arange(40) < 21).astype(float)
    gaps = ss.ThresholdRecord(
        dials={"a": [0, 1, 2]},
        losses={"zero_one": np.column_stack([wrong, 1 - wrong, wrong])},
        costs={"time": [1.0, 0.4, 0.6]},
    )
    assert gaps.curve().risk()[1] < 0
    assert ss.Path.pareto(gaps).columns == (0, 2, 1)


def test_order_of_the_front():
    order = pareto_order(np.array([0, 0.5, 0.1, 0.1, 0.2]), np.array([1, 0.2, 0.8, 0.5, 0.6]))
    assert order.tolist() == [0, 3, 1]


def test_calibrating_on_samples_of_the_pilot_is_refused():
    whole = record()
    path = ss.Path.pareto(whole.take(np.arange(100)))
    with pytest.raises(ValueError, match=r"holds 1 of them \(id 99\)"):
        ss.calibrate(whole.take(np.arange(99, 600)), risk="consistency", epsilon=0.05, path=path)
    with pytest.raises(ValueError, match="samples of the pilot"):
        ss.evaluate(whole, risk="consistency", epsilons=[0.05], n_calibration=50, path=path)
    policy = ss.calibrate(
        whole.take(np.arange(100, 600)), risk="consistency", epsilon=0.05, path=path
    )
    assert policy.certificate.samples.pilot == 100


def test_the_same_samples_without_ids_are_recognised():
    """Records that only number their samples share numbers, so their content is compared."""
    path = ss.Path.pareto(record(order=1))
    with pytest.raises(ValueError, match="holds all of them"):
        ss.calibrate(record(order=2), risk="consistency", epsilon=0.05, path=path)
    others = record(seed=1, order=2)
    assert ss.calibrate(others, risk="consistency", epsilon=0.05, path=path).threshold is not None


def test_parts_of_a_record_without_ids_and_with_a_given_seed_are_not_recognised():
    """The documented limit: numbers identify nothing, and no drawn seed shows common parts."""
    path = ss.Path.pareto(record(100, order=1))
    ss.calibrate(record(600, order=1), risk="consistency", epsilon=0.05, path=path)
    drawn = record(600)
    path = ss.Path.pareto(drawn.take(np.arange(100)))
    with pytest.raises(ValueError, match="holds 100 of them"):
        ss.calibrate(drawn, risk="consistency", epsilon=0.05, path=path)


def test_groups_of_the_pilot_are_refused():
    whole = record(groups=np.arange(600) // 3)
    path = ss.Path.pareto(whole.take(np.arange(100)))  # cuts group 33
    with pytest.raises(ValueError, match=r"1 of their groups \(33\)"):
        ss.calibrate(whole.take(np.arange(100, 600)), risk="consistency", epsilon=0.05, path=path)


def test_learned_paths_of_exits_refuse_their_pilot_too():
    sample = ss.simulate.Population().sample(300, seed=0)
    whole = ss.ExitRecord.from_logits(sample.logits, sample.labels)
    pilot, _ = whole.split(100)
    path = ss.Path.pareto(pilot, loss="zero_one")
    with pytest.raises(ValueError, match="samples of the pilot"):
        ss.calibrate(whole, loss="zero_one", epsilon=0.05, path=path)


def test_a_path_is_for_its_settings():
    path = ss.Path.pareto(record(100))
    other = record(500, seed=1, dials=DIALS | {"rollback": (0.0, 1.5, 2.0, 4.0, 1.5, 2.0, 4.0)})
    with pytest.raises(ValueError, match="`path` must be of this record's settings"):
        ss.calibrate(other, risk="consistency", epsilon=0.05, path=path)


def test_an_unlabelled_pilot_orders_a_labelled_calibration():
    """The consistency stands in for the gap."""
    pilot, labelled = record(), record(seed=1)
    labelled = replace(labelled, losses={"mse": labelled.inconsistencies["mse"]})
    policy = ss.calibrate(labelled, epsilon=0.05, path=ss.Path.pareto(pilot))
    assert policy.settings["fallback"] == 0.2


def test_paths_need_costs():
    with pytest.raises(ValueError, match="`pilot` must have costs"):
        ss.Path.pareto(record(costs={}))


# -------------------------------------------------------------------------------------- split


def learned(pilot, epsilon=0.06, **given):
    """A request whose path is learned on a pilot."""
    return request_of(risk="consistency", epsilon=epsilon, path=ss.Path.learn(pilot), **given)


def test_a_split_says_how_many_samples_went_where():
    policy = learned(0.25).run(record())
    assert (policy.certificate.samples.pilot, policy.certificate.samples.n) == (150, 450)
    assert "the 450 calibration samples (the path was learned on 150 others)" in str(policy)
    assert "the samples were split by a seed drawn at random from the operating system" in str(
        policy
    )
    assert policy.settings == {"rollback": 2.0, "fallback": 0.2, "scheme": "rollback"}


def test_a_split_is_repeated_by_its_seed():
    first, again, other = (learned(100).run(record(order=seed)).certificate for seed in (3, 3, 4))
    data = [each.provenance.data for each in (first, again, other)]
    assert data[0] == data[1] != data[2]


def grouped_exits(n=600):
    sample = Population().sample(n, seed=0)
    return ss.ExitRecord.from_logits(sample.logits, sample.labels).grouped(np.arange(n) // 3)


@pytest.mark.parametrize("average", [{}, {"average": "sample", "max_size": 3}], ids=str)
@pytest.mark.parametrize("kind", ["dials", "exits"])
def test_a_split_of_groups_counts_groups(kind, average):
    """200 groups of three: 50 for the path and 150 to calibrate, whatever their sizes."""
    whole = grouped_exits() if kind == "exits" else record(groups=np.arange(600) // 3)
    whole = whole.grouped(whole.groups, **average)
    policy = learned(50, epsilon=0.2, loss="zero_one" if kind == "exits" else None).run(whole)
    assert not policy.runs_full_model
    assert (policy.certificate.samples.pilot, policy.certificate.samples.n) == (50, 150)
    assert policy.certificate.samples.n_samples == 450
    assert "the 150 calibration groups (the path was learned on 50 others)" in str(policy)
    assert "no group of the pilot that the path was learned on also calibrates" in str(policy)
    assert "the groups were split by a seed drawn at random" in str(policy)


def test_a_grouped_pilot_of_single_samples_counts_samples():
    path = ss.Path.pareto(record(groups=np.arange(600) // 3))
    policy = ss.calibrate(record(seed=1), risk="consistency", epsilon=0.2, path=path)
    assert (policy.certificate.samples.pilot, policy.certificate.samples.n) == (600, 600)
    assert "no sample of the pilot" in str(policy)


def test_a_split_keeps_groups_whole():
    whole = record(groups=np.arange(600) // 3)
    pilot, rest = whole.split(50)
    assert len(np.unique(pilot.groups)) == 50
    assert not set(pilot.groups) & set(rest.groups)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pilot": 600}, "`pilot` must be at least 2 samples, and leave at least 1"),
        ({"pilot": 1.5}, r"`pilot` must be in \(0, 1\)"),
        ({"pilot": 100, "cost": "pases"}, "passes"),
    ],
)
def test_splits_that_cannot_be(options, message):
    path = ss.Path.learn(**options)
    with pytest.raises(ValueError, match=message):
        ss.calibrate(record(), risk="consistency", epsilon=0.05, path=path)


def test_a_path_is_not_learned_in_a_finite_population():
    """The samples left are drawn from the rest of it, so nothing would be said of the pilot."""
    with pytest.raises(ValueError, match="finite population"):
        learned(100).run(record().drawn_from(700))


@pytest.mark.parametrize("facts", ["weights", "groups"])
def test_a_path_is_learned_on_samples_as_they_count(facts):
    whole = record()
    if facts == "groups":
        whole = whole.grouped(np.arange(600) // 2)
    else:
        whole = whole.weighted(np.tile([1.5, 0.5], 300), max_weight=1.5)
    policy = learned(100, epsilon=0.1).run(whole)
    assert policy.certificate.samples.pilot == 100
    assert policy.certificate.samples.unit == ("groups" if facts == "groups" else "samples")
    assert policy.threshold is not None


# ------------------------------------------------------------------------------------ policies


def test_a_policy_carries_its_dials(tmp_path):
    policy = learned(100).run(record())
    policy.save(tmp_path / "policy.json")
    found = ss.Policy.load(tmp_path / "policy.json")
    assert found == policy
    assert found.dials == ("rollback", "fallback")
    assert repr(found).startswith("Policy(rollback=2, fallback=0.2, mse inconsistency")
    assert "It runs at rollback = 2, fallback = 0.2, scheme = rollback, and " in found.sentence
    assert "rollback" in found._repr_html_()
    binding = PolicyBinding(found, "bild", "swiftsure.text.sweep_pair")
    assert binding.dial("rollback") == 2.0
    assert binding.dial("fallback") == 0.2


def test_without_a_certified_setting_the_full_model_runs():
    policy = learned(5, epsilon=0.01).run(record(20))
    assert policy.runs_full_model
    assert policy.settings == {"rollback": 0.0, "fallback": 0.5, "scheme": "rollback"}
    assert PolicyBinding(policy, "bild", "swiftsure.text.sweep_pair").dial("rollback") is None


def test_a_policy_is_evaluated_by_its_settings():
    """Also on a record with the same settings in another order."""
    policy = learned(100).run(record())
    other = record(400, seed=1)
    turned = [0, 6, 5, 4, 3, 2, 1]
    mixed = replace(
        other,
        dials={name: [values[k] for k in turned] for name, values in other.dials.items()},
        inconsistencies={"mse": other.inconsistencies["mse"][:, turned]},
        costs={"passes": COSTS[turned]},
    )
    assert policy.evaluate(mixed) == policy.evaluate(other)
    assert policy.evaluate(other).saving == pytest.approx(0.65)
    with pytest.raises(ValueError, match="must have the policy's dials"):
        policy.evaluate(ss.ThresholdRecord([None, 1.0], inconsistencies={"mse": [[0.0, 0.1]]}))


# ------------------------------------------------------------------------------------ branches


@pytest.mark.parametrize("flow", [True, False])
def test_the_cheapest_certified_setting_of_all_branches_is_chosen(flow):
    whole = record(2000)
    path = ss.Path.branching(whole.branches(along="rollback"), whole, flow=flow)
    policy = ss.calibrate(whole, risk="consistency", epsilon=0.06, path=path)
    assert policy.settings["rollback"] == 2.0
    assert policy.settings["fallback"] == 0.2
    assert policy.certificate.path.startswith("2 branches of settings")
    assert policy.certificate.samples.n == 2000


def test_a_cost_chooses_among_branches():
    whole = record(2000, costs={"passes": COSTS, "money": COSTS[[0, 3, 2, 1, 6, 5, 4]]})
    branches = whole.branches(along="rollback")
    path = ss.Path.branching(branches, whole, cost="money")
    policy = ss.calibrate(whole, risk="consistency", epsilon=0.06, path=path)
    assert policy.settings["rollback"] == 1.0
    with pytest.raises(ValueError, match="`cost` must be one of"):
        ss.Path.branching(branches, whole, cost="time")


@pytest.mark.parametrize("branches", [[], [[1], []], [[1, 2], [2]], [[0, 1]]])
def test_branches_that_cannot_be(branches):
    with pytest.raises(ValueError, match="`branches` must be"):
        ss.Path.branching(branches, record())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"control": "crc"}, "branches needs ucb"),
        ({"control": ss.Control("ltt", correction="bonferroni")}, "branches needs ucb"),
    ],
)
def test_branches_need_a_walk(options, message):
    whole = record()
    path = ss.Path.branching(whole.branches(along="rollback"), whole)
    with pytest.raises(ValueError, match=message):
        ss.calibrate(whole, risk="consistency", epsilon=0.05, path=path, **options)
    limit = ss.CostPromise("passes", at_most=0.5)
    with pytest.raises(ValueError, match="branches have no fast end"):
        request_of(limit, risk="consistency", epsilon=0.05, path=path).run(whole)


def test_branches_keep_several_promises():
    """Each setting is tested with the largest of the p-values, so the stricter one decides."""
    whole = record(2000)
    path = ss.Path.branching(whole.branches(along="rollback"), whole)
    strict, loose = (ss.Promise(risk="consistency", epsilon=e) for e in (0.06, 0.2))
    both = ss.calibrate(whole, [loose, strict], path=path)
    alone = [ss.calibrate(whole, each, path=path) for each in (strict, loose)]
    assert both.settings == alone[0].settings != alone[1].settings
    assert [p.epsilon for p in both.certificate.promises] == [0.2, 0.06]


@pytest.mark.parametrize("facts", ["weights", "groups", "slices"])
def test_branches_go_with_every_draw(facts):
    whole = record(2000)
    path = ss.Path.branching(whole.branches(along="rollback"), whole)
    drawn = {
        "weights": lambda: whole.weighted(np.tile([1.5, 0.5], 1000), max_weight=1.5),
        "groups": lambda: whole.grouped(np.arange(2000) // 2),
        "slices": lambda: whole.sliced(["a", "b"] * 1000),
    }[facts]()
    within = "slices" if facts == "slices" else None
    request = request_of(risk="consistency", epsilon=0.08, path=path, within=within)
    policy = request.run(drawn)
    assert policy.settings["fallback"] == 0.2
    assert policy.evaluate(drawn).risk <= 0.08


def test_branches_are_refused_where_settings_must_be_in_one_order():
    known = record()
    path = ss.Path.branching(known.branches(along="rollback"), known)
    options = {"risk": "consistency", "loss": "mse", "epsilon": 0.1, "path": path}
    with pytest.raises(ValueError, match="grows must be one sequence"):
        request_of(**options).start().update(known)
    del options["epsilon"]
    with pytest.raises(ValueError, match="needs a path without branches"):
        ss.planning.lowest_epsilon(known, saving=0.3, **options)
