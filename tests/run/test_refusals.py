"""Every system refuses every other system's policy, whatever else the two have in common."""

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.run import Rule, Runs, Sweep

pytest.importorskip("torch")
pytest.importorskip("transformers")

from swiftsure.diffusion.rules import DeeDiffRule
from swiftsure.text.bild.rules import DraftRule
from swiftsure.text.calm.rules import CalmRule

RULES = {rule.system: rule for rule in (CalmRule, DraftRule, DeeDiffRule)}
SETTINGS = {
    "calm": {"score": "softmax", "n_exits": 4},
    "bild": {"scheme": "rollback"},
    "deediff": {"score": "model", "n_exits": 4},
}
DIALS = {"calm": "threshold", "bild": "rollback", "deediff": "threshold"}


class Constant(Sweep):
    """A system whose answer never changes."""

    def prepare(self, inputs):
        return lambda rows, _: Runs({"loss": np.zeros(len(rows))}, np.ones((len(rows), 2), bool))

    def columns(self, inputs, tables):
        return {
            "inconsistencies": {"mse": tables["loss"]},
            "ids": np.arange(inputs.start, inputs.stop),
        }

    def identity(self):
        return {}


def swept(system, like):
    """Return a policy that is in everything but its system like those of another one."""
    full = 0.0 if DIALS[like] == "rollback" else np.inf
    record = Constant(
        system=system, grid=np.asarray([full, 0.5]), dial=DIALS[like], settings=SETTINGS[like]
    ).run(60)
    assert record.settings["system"] == system
    return ss.calibrate(record, risk="consistency", loss="mse", epsilon=0.1)


@pytest.mark.parametrize("other", [*RULES, "a new system"])
@pytest.mark.parametrize("name", RULES)
def test_only_its_own_policies_run(name, other, tmp_path):
    swept(other, like=name).save(tmp_path / "policy.json")
    policy = ss.Policy.load(tmp_path / "policy.json")
    if name == other:
        assert isinstance(RULES[name].of(policy), Rule)
        return
    with pytest.raises(
        ValueError, match=f"not made for {name} but for {other}: make its record with"
    ):
        RULES[name].of(policy)


@pytest.mark.parametrize("name", RULES)
def test_a_policy_from_arrays_is_of_no_system(name):
    policy = swept(name, like=name)
    settings = {key: value for key, value in policy.settings.items() if key != "system"}
    assert isinstance(RULES[name].of(policy.model_copy(update={"settings": settings})), Rule)


def test_a_network_with_exits_refuses_them_all():
    from torch import nn

    from swiftsure.torch import EarlyExit, Staged

    class Tiny(Staged):
        n_exits = 4

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def advance(self, exit_index, state):
            return state

        def head(self, exit_index, state):
            return self.layer(state)

    for name in RULES:
        with pytest.raises(ValueError, match=f"not made for exits of a network but for {name}"):
            EarlyExit(Tiny().eval(), swept(name, like=name))
