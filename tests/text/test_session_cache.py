"""SessionCache are kept as long as the weights stay where they are."""

import pytest
import torch
from torch import nn

from swiftsure.text.session_cache import SessionCache


def assign(model):
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def move(model):
    model[1][0].weight.data = model[1][0].weight.data.clone()


def replace_module(model):
    model[1][0] = nn.Linear(3, 2)


def delete_weight(model):
    model[0].bias = None


def add_weight(model):
    model[2].bias = nn.Parameter(torch.ones(2))


def change_in_place(model):
    with torch.no_grad():
        model[1][0].weight.add_(1)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})


@pytest.mark.parametrize(
    "change", [assign, move, replace_module, delete_weight, add_weight, change_in_place]
)
def test_sessions_go_with_their_weights(change):
    model = nn.Sequential(
        nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 2)), nn.Linear(2, 2, bias=False)
    )
    sessions = SessionCache([model, None])
    first = sessions.get("a", object, unlimited=True)
    assert sessions.get("a", object, unlimited=True) is first
    change(model)
    assert (sessions.get("a", object, unlimited=True) is first) == (change is change_in_place)
    assert len(sessions) == 1
