"""The staged protocol, and `check`, which says what is wrong with a model."""

import pytest
import torch
from torch import nn

from swiftsure.torch import Scored, Staged, StagedModel, check
from swiftsure.torch.staged import all_outputs, batch_size, device_of, rows_of
from tests.torch.builders import Played, inputs, logits, network, refused


class Sound(Staged):
    """A model with nothing wrong; the others below differ from it in one thing."""

    n_exits = 3

    def __init__(self):
        super().__init__()
        self.plain = network(n_exits=3)
        self.eval()

    def advance(self, exit_index, state):
        return self.plain.advance(exit_index, state)

    def head(self, exit_index, state):
        return self.plain.head(exit_index, state)


# ------------------------------------------------------------------------------------ the protocol


def test_stages_in_a_row():
    stages = [nn.Linear(6, 4), nn.Linear(4, 4)]
    heads = [nn.Linear(4, 3), nn.Linear(4, 3)]
    model = Staged.from_sequential(stages, heads)
    assert isinstance(model, StagedModel)
    assert model.n_exits == 2
    x = inputs(5)
    first, second = model(x)
    assert torch.equal(first, heads[0](stages[0](x)))
    assert torch.equal(second, heads[1](stages[1](stages[0](x))))
    assert set(model.state_dict()) == {
        f"{kind}.{k}.{name}"
        for kind in ("stages", "heads")
        for k in (0, 1)
        for name in ("weight", "bias")
    }


def test_stages_that_do_not_fit():
    with refused("heads"):
        Staged.from_sequential([nn.Identity()] * 2, [nn.Identity()])
    with refused("stages"):
        Staged.from_sequential([nn.Identity()], [nn.Identity()])


def test_all_outputs_are_without_confidences():
    class Own(Sound):
        def head(self, exit_index, state):
            output = super().head(exit_index, state)
            return Scored(output, output[:, 0]) if exit_index == 1 else output

    outputs = all_outputs(Own(), inputs(4))
    for one, two in zip(outputs, Sound()(inputs(4)), strict=True):
        assert torch.equal(one, two)


def test_rows_of_nested_tensors():
    tree = {"a": torch.arange(5), "b": [(torch.arange(10).view(5, 2),), "text", None, 3]}
    part = rows_of(tree, torch.tensor([4, 0, 0]))
    assert part["a"].tolist() == [4, 0, 0]
    assert part["b"][0][0].tolist() == [[8, 9], [0, 1], [0, 1]]
    assert part["b"][1:] == ["text", None, 3]


def test_rows_of_a_scored_output():
    part = rows_of(Scored(torch.arange(3), torch.rand(3)), torch.tensor([2]))
    assert isinstance(part, Scored)
    assert part.output.tolist() == [2]


def test_sizes_and_devices():
    tree = {"a": torch.tensor(1.0), "b": [torch.zeros(7, 2)]}
    assert batch_size(tree) == 7
    assert device_of(tree) == torch.device("cpu")
    with refused("batch"):
        batch_size({"a": "text"})


# ------------------------------------------------------------------------------------------ check


class Own(Sound):
    def head(self, exit_index, state):
        output = super().head(exit_index, state)
        return Scored({"logits": output, "best": output.argmax(dim=1)}, output.softmax(1).amax(1))


class Nested(Sound):
    def begin(self, batch):
        return {"x": batch, "rest": (None, [batch[:, 0]], "text", True)}

    def advance(self, exit_index, state):
        return {**state, "x": super().advance(exit_index, state["x"])}

    def head(self, exit_index, state):
        return super().head(exit_index, state["x"])


class Frozen(Sound):
    """Batch statistics that were fixed in training."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16).eval()

    def advance(self, exit_index, state):
        return self.norm(super().advance(exit_index, state))


@pytest.mark.parametrize("kind", [Sound, Own, Nested, Frozen])
def test_sound_models_pass(kind):
    assert check(kind(), inputs(6)) is None


def test_half_precision_rounds_but_passes():
    model = network(n_exits=3, width=64).bfloat16()
    check(model, inputs(33).bfloat16())


def test_played_models_pass():
    check(Played(4), logits(5))


class Shared(Sound):
    def begin(self, batch):
        return batch, torch.ones(6)

    def advance(self, exit_index, state):
        x = state[0] * state[1] if exit_index == 0 else state[0]
        return super().advance(exit_index, x), state[1]

    def head(self, exit_index, state):
        return super().head(exit_index, state[0])


class Scalar(Shared):
    def begin(self, batch):
        return batch, torch.tensor(1.0)


class Number(Shared):
    def begin(self, batch):
        return batch, len(batch)


class LaterNumber(Sound):
    def advance(self, exit_index, state):
        x = state[0] if isinstance(state, tuple) else state
        x = super().advance(exit_index, x)
        return (x, 2.5) if exit_index == 1 else x

    def head(self, exit_index, state):
        return super().head(exit_index, state[0] if isinstance(state, tuple) else state)


class NotATensor(Sound):
    def begin(self, batch):
        return "text"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Shared, r"state before exit 1 .* the batch .* 5, but \[1\] has shape \(6,\)"),
        (Scalar, r"state before exit 1 .* the batch .* 5, but \[1\] has shape \(\)"),
        (Number, r"state before exit 1 .* \[1\] is the number 5"),
        (LaterNumber, r"state at exit 2 .* \[1\] is the number 2\.5"),
        (NotATensor, "state before exit 1 must hold tensors, but got str"),
    ],
)
def test_states_that_cannot_follow_the_samples(kind, words):
    with pytest.raises((ValueError, TypeError), match=words):
        check(kind(), inputs(5))


class SelectsNothing(Sound):
    def select(self, state, index):
        return state


class SelectsTheFirst(Sound):
    def select(self, state, index):
        return state[: len(index)]


class SelectsInPart(Sound):
    """One of the two tensors of the state is not selected, once there are two."""

    def advance(self, exit_index, state):
        x = super().advance(exit_index, state["x"] if isinstance(state, dict) else state)
        if isinstance(state, dict):
            return {"x": x, "early": state["early"]}
        return {"x": x, "early": x[:, :5]}

    def head(self, exit_index, state):
        return super().head(exit_index, state["x"]) + state["early"]

    def select(self, state, index):
        return {"x": state["x"][index], "early": state["early"][: len(index)]}


class SelectsTheEarlyStates(Sound):
    """What the second stage adds to the state is not selected."""

    def begin(self, batch):
        return {"x": batch}

    def advance(self, exit_index, state):
        x = super().advance(exit_index, state["x"])
        if exit_index == 0:
            return {"x": x}
        return {"x": x, "more": state.get("more", x[:, :5])}

    def head(self, exit_index, state):
        return super().head(exit_index, state["x"]) + state.get("more", 0.0)

    def select(self, state, index):
        if "more" not in state:
            return {"x": state["x"][index]}
        return {"x": state["x"][index], "more": state["more"][: len(index)]}


@pytest.mark.parametrize(
    "kind", [SelectsNothing, SelectsTheFirst, SelectsInPart, SelectsTheEarlyStates]
)
def test_select_that_does_not_select(kind):
    with pytest.raises(ValueError, match="`select`"):
        check(kind(), inputs(5))


def by_the_batch(place):
    """A model whose samples are centred by the mean of their batch, in one place."""

    class Dependent(Sound):
        def begin(self, batch):
            return batch - batch.mean(dim=0) if place == "begin" else batch

        def advance(self, exit_index, state):
            state = super().advance(exit_index, state)
            return state - state.mean(dim=0) if place == exit_index else state

        def head(self, exit_index, state):
            output = super().head(exit_index, state)
            return output - output.mean(dim=0) if place == f"head {exit_index}" else output

    return Dependent()


@pytest.mark.parametrize("place", ["begin", 0, 1, 2, "head 0", "head 1", "head 2"])
def test_samples_that_depend_on_each_other(place):
    with pytest.raises(ValueError, match="must not depend on the other samples of a batch"):
        check(by_the_batch(place), inputs(6))


class Narrower(Sound):
    def head(self, exit_index, state):
        output = super().head(exit_index, state)
        return output[:, :4] if exit_index == 2 else output


class OtherKeys(Sound):
    def head(self, exit_index, state):
        output = super().head(exit_index, state)
        return {"a" if exit_index < 2 else "b": output}


class NoRows(Sound):
    def head(self, exit_index, state):
        return super().head(exit_index, state).mean(dim=0)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Narrower, r"exit 1 returns \(5,\) and exit 3 \(4,\)"),
        (OtherKeys, "same shape, but exit 1 returns .* and exit 3"),
        (NoRows, "output of exit 1"),
    ],
)
def test_outputs_that_do_not_fit_together(kind, words):
    with pytest.raises(ValueError, match=words):
        check(kind(), inputs(6))


def test_outputs_may_lack_a_part():
    class Lacking(Sound):
        def head(self, exit_index, state):
            return {"logits": super().head(exit_index, state), "attention": None}

    check(Lacking(), inputs(6))


@pytest.mark.parametrize("name", ["begin", "advance", "head", "select"])
def test_missing_methods(name):
    class Plain:
        n_exits = 2

    for each in {"begin", "advance", "head", "select"} - {name}:
        setattr(Plain, each, lambda self, *arguments: arguments[-1])
    with pytest.raises(TypeError, match=f"must have a method `{name}`"):
        check(Plain(), inputs(5))


def test_the_number_of_exits():
    model = Sound()
    for n_exits in (0, 1):
        model.n_exits = n_exits
        with refused("model.n_exits"):
            check(model, inputs(5))


def test_training_mode():
    with refused("model"):
        check(Sound().train(), inputs(5))


def test_too_few_samples():
    with refused("batch"):
        check(Sound(), inputs(2))


def test_gradients_are_not_kept():
    class Watched(Sound):
        def advance(self, exit_index, state):
            assert not torch.is_grad_enabled()
            return super().advance(exit_index, state)

    check(Watched(), inputs(5))
