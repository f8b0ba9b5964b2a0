"""Figures: what is drawn is what was found, and files are written whole."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

import swiftsure as ss
from swiftsure.certify import bounds
from swiftsure.curves.transforms import zero_bounded
from swiftsure.report import policy_figure, save_figure, study_figure
from swiftsure.study import planning
from swiftsure.study.simulate import Population

MAGIC = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}
EPSILONS = [0.1, 0.02, 0.05]  # not in order
RISING = [0.02, 0.05, 0.1]
LABELS = ("crc", "ucb", "naive")


@pytest.fixture(scope="module")
def record():
    sample = Population(n_exits=4, overconfidence=1.5).sample(600, 0)
    return ss.ExitRecord.from_logits(
        sample.logits, sample.labels, losses=["zero_one"], costs={"layers": [3, 6, 9, 12]}
    )


def evaluated(record, n=200):
    controls = {
        "crc": ss.Control("crc"),
        "ucb": ss.Control("ucb"),
        "naive": ss.Control("empirical"),
    }
    repeats = ss.Repeats(8, draws=1)
    return ss.evaluate(
        record, controls=controls, epsilons=EPSILONS, n_calibration=n, splits=repeats
    )


@pytest.fixture(scope="module")
def study(record):
    return evaluated(record)


@pytest.fixture(scope="module")
def certified(record):
    """A curve and the policy that was calibrated on it."""
    record = replace(record, order=5)
    return record.curve(), ss.calibrate(record, epsilon=0.05, bound="star")


def line(axis, label):
    """The one line of a label, as x and y."""
    found = [each for each in axis.lines if each.get_label() == label]
    assert len(found) == 1
    return found[0]


# ---------------------------------------------------------------------------------------- studies


def test_lines_are_the_means_over_splits(study):
    above, below = study_figure(study).axes
    order = np.argsort(EPSILONS)
    for label in LABELS:
        shown = label if label != "naive" else "naive: no guarantee"
        for axis, runs in ((above, study.test_risk), (below, study.mean_cost)):
            drawn = line(axis, shown)
            np.testing.assert_array_equal(drawn.get_xdata(), RISING)
            np.testing.assert_allclose(drawn.get_ydata(), runs[label].mean(axis=0)[order])


def test_bands_are_the_spread_over_splits(study):
    above, below = study_figure(study).axes
    order = np.argsort(EPSILONS)
    for axis, runs in ((above, study.test_risk), (below, study.mean_cost)):
        assert len(axis.collections) == len(LABELS)
        for band, label in zip(axis.collections, LABELS, strict=True):
            mean, spread = runs[label].mean(axis=0)[order], runs[label].std(axis=0)[order]
            corners = band.get_paths()[0].vertices
            for x, low, high in zip(RISING, mean - spread, mean + spread, strict=True):
                heights = corners[corners[:, 0] == x][:, 1]
                assert (heights.min(), heights.max()) == pytest.approx((low, high))


def test_rules_without_a_guarantee_are_dashed_and_say_so(study):
    above, _ = study_figure(study).axes
    assert line(above, "ucb").get_linestyle() == line(above, "crc").get_linestyle() == "-"
    assert line(above, "naive: no guarantee").get_linestyle() == "--"
    shown = [text.get_text() for text in above.get_legend().get_texts()]
    assert shown == ["crc", "ucb", "naive: no guarantee", "ε"]
    assert len({to_hex(each.get_color()) for each in above.lines}) == 4


def test_the_level_and_the_full_model_are_there_to_compare_with(study):
    above, below = study_figure(study).axes
    diagonal = line(above, "ε")
    np.testing.assert_array_equal(diagonal.get_xdata(), diagonal.get_ydata())
    assert max(diagonal.get_xdata()) == 0.1
    assert list(below.lines[-1].get_ydata()) == [12.0, 12.0]
    assert [text.get_text() for text in below.texts] == ["full model"]
    assert above.get_ylabel() == "test risk (zero_one gap)"
    assert below.get_ylabel() == "mean layers"
    assert below.get_xlabel() == "risk level ε"


def test_several_studies_stand_side_by_side(record, study):
    other = evaluated(record, 400)
    for several, titles in [
        ([study, other], ["n = 200", "n = 400"]),
        ({"few": study, "many": other}, ["few", "many"]),
    ]:
        axes = study_figure(several).axes
        assert [axis.get_title(loc="left") for axis in axes[:2]] == titles
        drawn = line(axes[1], "ucb").get_ydata()
        mean = other.test_risk["ucb"].mean(axis=0)[np.argsort(EPSILONS)]
        np.testing.assert_allclose(drawn, mean)


def test_no_studies_are_refused():
    with pytest.raises(ValueError, match="`studies` must not be empty"):
        study_figure([])


def test_studies_of_the_same_size_are_both_shown(record, study):
    other = ss.evaluate(
        record, risk="consistency", controls=["ucb"], epsilons=RISING, n_calibration=200, splits=2
    )
    assert len(study_figure([study, other]).axes) == 4


def test_many_controls_are_all_drawn(record):
    """There are more of them than colours."""
    rules = {f"rule {k}": ss.Control("crc") for k in range(9)}
    many = ss.evaluate(record, controls=rules, epsilons=[0.1, 0.2], splits=1)
    assert {f"rule {k}" for k in range(9)} <= {
        each.get_label() for each in study_figure(many).axes[0].lines
    }


def test_a_study_without_costs_names_no_cost():
    losses = np.zeros((100, 2))
    losses[::20, 1] = 1
    curve = ss.RiskCurve.from_losses([1.0, 0.5], losses)
    found = ss.evaluate(curve, controls=["crc"], epsilons=[0.2], n_calibration=50, splits=1)
    assert "None" not in study_figure(found).axes[1].get_ylabel()


# --------------------------------------------------------------------------------------- policies


def test_the_risk_curve_is_drawn_as_it_is(certified):
    curve, policy = certified
    above, below = policy_figure(curve, policy).axes
    drawn = line(above, "risk on the calibration samples")
    np.testing.assert_array_equal(drawn.get_xdata(), np.arange(curve.n_settings))
    np.testing.assert_allclose(drawn.get_ydata(), curve.risk())
    saved = below.lines[0].get_ydata()
    np.testing.assert_allclose(saved, 100 * (1 - curve.mean_cost("exit") / 4))
    assert above.get_ylabel() == "zero_one gap"


def test_the_bound_is_drawn_as_it_was_tested(certified):
    curve, policy = certified
    drawn = line(policy_figure(curve, policy).axes[0], "90 % upper bound (star)")
    ordered, rows = curve.shuffled(5), np.arange(curve.n)
    for position, height in list(zip(drawn.get_xdata(), drawn.get_ydata(), strict=True))[::16]:
        expected = bounds.BOUNDS["star"].upper(ordered, rows, int(position), 0.1, 0)
        assert height == pytest.approx(expected)
    # Up to the chosen setting, and not at the next, the bound is within the level.
    chosen = policy.certificate.index
    heights, positions = drawn.get_ydata(), drawn.get_xdata()
    assert (heights[positions <= chosen] <= 0.05 + 1e-6).all()
    assert (heights[positions > chosen][:3] > 0.05).any()


def test_the_bound_of_a_budget_is_the_level_at_its_setting(record):
    # Few enough settings that each is drawn.
    curve = replace(record, order=5).curve(path=np.linspace(1, 0, 50))
    budget = planning.Budget(saving=0.3, cost="exit")
    policy = planning.lowest_epsilon(curve, budget).policy
    drawn = line(policy_figure(curve, policy).axes[0], "90 % upper bound (trinomial)")
    height = drawn.get_ydata()[drawn.get_xdata() == policy.certificate.index]
    assert height == pytest.approx([policy.certificate.promises[0].epsilon])


def test_level_and_choice_are_marked(certified):
    curve, policy = certified
    above, below = policy_figure(curve, policy).axes
    flat = [each for each in above.lines if list(each.get_ydata()) == [0.05, 0.05]]
    assert len(flat) == 1
    for axis in (above, below):
        assert list(axis.lines[-1].get_xdata()) == [policy.certificate.index] * 2
    assert below.get_xticklabels()[0].get_text() == "never"


def test_another_cost_may_be_shown(certified):
    curve, policy = certified
    below = policy_figure(curve, policy, cost="layers").axes[1]
    assert "layers" in below.get_ylabel()
    with pytest.raises(ValueError, match="`cost` must be one of: exit, layers"):
        policy_figure(curve, policy, cost="flops")


@pytest.mark.parametrize("control", ["crc", "empirical"])
def test_controls_without_a_bound_show_none(record, control):
    policy = ss.calibrate(record, control=control, epsilon=0.05)
    labels = [each.get_label() for each in policy_figure(record.curve(), policy).axes[0].lines]
    assert not any("upper bound" in label for label in labels)


def test_the_full_model_has_no_mark(record):
    policy = ss.calibrate(record, epsilon=0.001)
    assert policy.runs_full_model
    for axis in policy_figure(record.curve(), policy).axes:
        assert not any(len(set(each.get_xdata())) == 1 for each in axis.lines)


def test_per_exit_thresholds_can_be_drawn(record):
    path = ss.Path.family([[0.99, 0.95, 0.9], [0.9, 0.8, 0.7]])
    policy = ss.calibrate(record, epsilon=0.1, path=path)
    _, below = policy_figure(record.curve(path=path), policy).axes
    assert [each.get_text() for each in below.get_xticklabels()] == ["0", "1", "2"]


def test_the_bound_of_zero_bounded_losses(record):
    rule = ss.Control("ltt", bound="hoeffding_bentkus", zero_bounded=True)
    curve, policy = record.curve(), ss.calibrate(record, control=rule, epsilon=0.05)
    drawn = line(policy_figure(curve, policy).axes[0], "90 % upper bound (hoeffding_bentkus)")
    rows = np.arange(curve.n)
    for position, height in list(zip(drawn.get_xdata(), drawn.get_ydata(), strict=True))[::16]:
        expected = bounds.BOUNDS["hoeffding_bentkus"].upper(
            zero_bounded(curve), rows, int(position), 0.1, 0
        )
        assert height == pytest.approx(expected)


# ------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("name", ["f.png", "f.pdf", "f.svg", "f.PNG"])
def test_figures_are_saved_in_the_format_of_the_name(study, certified, tmp_path, name):
    kind = name.rpartition(".")[2].lower()
    study_figure(study, tmp_path / name)
    policy_figure(*certified, str(tmp_path / f"policy-{name}"))
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(MAGIC[kind])
        assert path.stat().st_size > 5000
    assert len(list(tmp_path.iterdir())) == 2


def test_a_figure_is_returned_and_can_be_saved_later(study, tmp_path):
    figure = study_figure(study)
    assert isinstance(figure, Figure)
    save_figure(figure, tmp_path / "later.svg")
    assert b"risk level" in (tmp_path / "later.svg").read_bytes()


@pytest.mark.parametrize("name", ["f.bmp", "f.jpg", "f.json", "f.png.txt"])
def test_other_formats_are_refused_and_nothing_is_written(study, tmp_path, name):
    with pytest.raises(ValueError, match=rf"must end in .png, .pdf or .svg, but got '{name}'"):
        study_figure(study, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_named(study, tmp_path):
    with pytest.raises(ValueError, match=r"existing folder.*nowhere"):
        study_figure(study, tmp_path / "nowhere" / "f.png")


def test_nothing_is_left_of_a_figure_that_fails_halfway(study, tmp_path, monkeypatch):
    (tmp_path / "f.png").write_bytes(b"older")

    def fails_halfway(_, path, **__):
        path.write_bytes(b"half")
        raise RuntimeError("no more space")

    monkeypatch.setattr(Figure, "savefig", fails_halfway)
    with pytest.raises(RuntimeError, match="no more space"):
        study_figure(study, tmp_path / "f.png")
    assert [path.name for path in tmp_path.iterdir()] == ["f.png"]
    assert (tmp_path / "f.png").read_bytes() == b"older"


def test_pyplot_is_never_loaded(tmp_path):
    """It keeps global state, picks a backend, and is slow to import."""
    program = (
        "import sys, numpy as np, swiftsure as ss\n"
        "losses = np.zeros((200, 2)); losses[::40, 1] = 1\n"
        "curve = ss.RiskCurve.from_losses([1.0, 0.5], losses, [2.0, 1.0])\n"
        "study = ss.evaluate(curve, controls=['ucb'], epsilons=[0.1], splits=2)\n"
        f"ss.report.study_figure(study, {str(tmp_path / 'study.pdf')!r})\n"
        "policy = ss.calibrate(curve, epsilon=0.1)\n"
        f"ss.report.policy_figure(curve, policy, {str(tmp_path / 'policy.png')!r}, cost='cost')\n"
        "print('matplotlib.pyplot' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert (done.stdout.strip(), done.stderr) == ("False", "")
    assert {path.name for path in tmp_path.iterdir()} == {"study.pdf", "policy.png"}


def test_the_figure_of_several_dials_names_the_setting():
    losses = (np.random.default_rng(0).random((400, 3)) < [0, 0.01, 0.3]).astype(float)
    dials = {"steps": [50, 25, 10], "cache": [0.0, 0.1, 0.1]}
    record = ss.ThresholdRecord(
        dials=dials, inconsistencies={"mse": losses}, costs={"seconds": [3.0, 2.0, 1.0]}
    )
    policy = ss.calibrate(record, risk="consistency", epsilon=0.05)
    below = ss.report.policy_figure(record.curve("consistency"), policy).axes[1]
    assert below.get_xlabel() == "setting, safest first"
    assert [text.get_text().strip() for text in below.texts] == ["steps = 25, cache = 0.1"]
