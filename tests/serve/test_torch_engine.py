"""`TorchEngine`: the answers of `EarlyExit`, from a folder, for requests of any length."""

import numpy as np
import pytest
import torch

from swiftsure.serve import Answer, EngineOptions, InvalidRequestError
from swiftsure.serve.engines.torch import TorchEngine
from swiftsure.serve.loading import load_engines
from swiftsure.torch import EarlyExit, attach_heads
from tests.torch.builders import inputs, middle_threshold, network, policy_of


@pytest.fixture(scope="module")
def engine():
    torch.set_num_threads(1)
    model, batch = network(), inputs(60)
    policy = policy_of(middle_threshold(model, batch), model.n_exits)
    return TorchEngine(EarlyExit(model, policy, on_invalid="mark"), batch)


def test_answers_are_those_of_early_exit(engine):
    batch = inputs(30, seed=3)
    samples = [engine.inputs.sample(row.tolist()) for row in batch]
    samples[4] = np.full(6, np.nan, np.float32)  # `sample` refuses it; the model must not break
    found, out = engine.answer(samples, full=False), engine.fast(batch)
    assert isinstance(found[4], InvalidRequestError)
    for row in [k for k in range(30) if k != 4]:
        assert found[row].exit == out.exits[row]
        assert found[row].content["prediction"] == out.predictions[row]
        np.testing.assert_allclose(found[row].content["outputs"], out.outputs[row], atol=1e-5)
        assert 0 < found[row].confidence <= 1
        if found[row].exit < 3:
            seen = float(out.confidences[row, out.exits[row]])
            assert found[row].confidence == pytest.approx(seen, abs=1e-5)


def test_the_full_model_answers_and_audits(engine):
    batch = inputs(30, seed=4)
    samples = [engine.inputs.sample(row.numpy()) for row in batch]
    fast, full = (engine.answer(samples, full=each) for each in (False, True))
    last = engine.fast.model(batch)[-1].argmax(dim=1).tolist()
    assert [each.content["prediction"] for each in full] == last
    assert {each.exit for each in full} == {3}
    for sample, one, two in zip(samples, fast, full, strict=True):
        differ = float(one.content["prediction"] != two.content["prediction"])
        assert engine.compare(sample, one, "zero_one").inconsistency == differ
        assert engine.compare(sample, two, "zero_one").inconsistency == 0.0
    assert sum(one.exit < 3 for one in fast) > 5


@pytest.mark.parametrize("settings", [{"capture": True}, {"compile": True}])
def test_an_installed_policy_keeps_the_settings(engine, settings, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda stage, **_: stage)
    fast = EarlyExit(engine.fast.model, engine.policy, on_invalid="mark", **settings)
    own = TorchEngine(fast, inputs(60))
    other = policy_of(0.0, 4)
    own.check(other)
    own.install(other)
    assert own.policy == other
    assert (own.fast.on_invalid, own.fast.captures is not None) == ("mark", "capture" in settings)
    assert own.fast._settings == fast._settings
    assert own.fast.executor.stages is fast.executor.stages  # compiled once


class Plain(torch.nn.Sequential):
    """A network that is not one of transformers."""

    def __init__(self):
        super().__init__(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_folder_of_a_plain_network_is_served(tmp_path, workers):
    network = Plain().eval()
    model = attach_heads(network, ["1"], inputs(8))
    EarlyExit(model, policy_of(0.5, model.n_exits)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="--network module:Plain"):
        load_engines(tmp_path)
    (engine,) = load_engines(tmp_path, workers, EngineOptions(network=Plain))
    samples = [engine.inputs.sample(row.tolist()) for row in inputs(5)]
    found = engine.answer(samples, full=True)
    with torch.no_grad():
        expected = network(inputs(5)).argmax(dim=1).tolist()
    assert [each.content["prediction"] for each in found] == expected
    if workers:
        engine.close()


def test_a_folder_of_transformers_is_served(tmp_path):
    pytest.importorskip("transformers")
    from tests.torch.test_pretrained import fast_bert, sentences

    fast = fast_bert()
    fast.save_pretrained(tmp_path)
    engine = TorchEngine.load(tmp_path)
    batch = sentences(4, seed=1)
    samples = [
        engine.inputs.sample({name: values[k].tolist() for name, values in batch.items()})
        for k in range(4)
    ]
    short = {name: values[:3] for name, values in samples[1].items()}
    wrong = {**samples[1], "input_ids": np.full(8, 4000)}  # not in the vocabulary
    found = engine.answer([*samples, short, wrong], full=False)
    out = fast(batch)
    for k in range(4):
        assert found[k].exit == out.exits[k]
        np.testing.assert_allclose(found[k].content["outputs"], out.outputs[k], atol=1e-5)
    assert isinstance(found[4], Answer)
    assert isinstance(found[5], InvalidRequestError)
    alone = engine.answer([wrong], full=True)
    assert isinstance(alone[0], InvalidRequestError)
    for bad in ([1, 2], {"input_ids": [1, 2]}, {**samples[0], "input_ids": [1.5] * 8}):
        with pytest.raises(InvalidRequestError):
            engine.inputs.sample(bad)
