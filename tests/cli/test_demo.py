"""`swiftsure demo`: a real network, certified and run."""

import json
import sys

import numpy as np
import pytest

from swiftsure import demo
from swiftsure.certify.policy import Policy

torch = pytest.importorskip("torch")


@pytest.fixture
def few(monkeypatch):
    """Fewer images, so that it is quick."""
    part = demo.SampleImages(*(each[:80] for each in demo.sample_images()))
    monkeypatch.setattr(demo, "sample_images", lambda: part)
    return part


def test_it_certifies_runs_and_leaves_its_files(run, folder, few):
    done = run("demo")
    assert (done.status, done.err) == (0, "")
    output = folder / "results" / "demo"
    names = {"policy.json", "policy.png", "images.png"}
    assert {path.name for path in output.iterdir()} == names
    policy = Policy.load(output / "policy.json")
    assert str(policy) in done.out
    assert policy.certificate.provenance.model is not None  # bound to the network it is for
    assert policy.certificate.samples.n == 2000
    lines = done.out.splitlines()
    assert "ε\tthreshold\tFLOPs saved %\tmean exit\taccuracy lost" in lines
    assert any(line.startswith("in full\t") for line in lines)
    assert any(line.endswith("times as fast.") for line in lines)


def test_what_was_measured_is_what_the_record_says(run, folder, few):
    """The network leaves and answers where its record says that it does."""
    shown = json.loads(run("demo", "--epsilon", "0.02", "--batch", "32", "--json").out)
    record = demo.record().take(few.ids)
    policy = Policy.load(folder / "results" / "demo" / "policy.json")
    exits = policy.exits(record.confidences["top1"])
    shares = np.bincount(exits, minlength=4) / record.n
    assert shown["measured"]["exit_shares"] == pytest.approx(shares.tolist())
    right = shown["measured"]["accuracy"]
    losses = record.losses["zero_one"]
    assert right["full"] == pytest.approx(1 - losses[:, -1].mean())
    assert right["early"] == pytest.approx(1 - losses[np.arange(record.n), exits].mean())
    assert min(shown["measured"]["images_per_second"].values()) > 0


def test_levels_buy_more_and_more(run, few):
    shown = json.loads(run("demo", "--json").out)
    saved = [row["flops_saved"] for row in shown["tradeoff"]]
    assert saved == sorted(saved)
    assert saved[-1] > 50


def test_without_torch_it_says_how_to_go_on(run, folder, monkeypatch):
    monkeypatch.setattr("swiftsure.cli.demo.find_spec", lambda name: None)
    done = run("demo")
    assert done.status == 0
    assert 'pip install "swiftsure[torch]"' in done.out
    assert {path.name for path in (folder / "results" / "demo").iterdir()} == {
        "policy.json",
        "policy.png",
    }


def test_nothing_certified_runs_in_full(run, few):
    done = run("demo", "--n", "20", "--json")
    assert done.status == 1
    shown = json.loads(done.out)
    assert shown["sentence"].startswith("Always runs the full model")
    assert shown["measured"]["exit_shares"][-1] == 1.0


def test_calibration_never_sees_the_images_that_are_run(run):
    done = run("demo", "--n", "9601")
    assert done.status == 2
    assert "`--n` must be at most 9,600" in done.err


@pytest.mark.parametrize("option", ["--n", "--batch"])
def test_sizes_are_checked(run, made, option):
    done = run("demo", option, "0")
    assert done.status == 2
    assert not made()


def test_without_the_zoo_a_command_that_needs_it_names_the_install_command(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "swiftsure_zoo", None)
    monkeypatch.delitem(sys.modules, "swiftsure_zoo.records", raising=False)
    done = run("translate")
    assert (done.status, done.out) == (2, "")
    assert done.err.count("\n") == 1
    assert 'pip install "swiftsure[zoo]"' in done.err
