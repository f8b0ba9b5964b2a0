"""Published hyperparameters: those that only training uses are ignored."""

import pytest

from swiftsure_zoo import ADPC, DViT, DynPerceiver, MSDNet, UViT
from tests.torch.reference import on_meta
from tests.zoo.test_adp_c import PUBLISHED as ADP_C
from tests.zoo.test_dvit import PUBLISHED as DVIT
from tests.zoo.test_dyn_perceiver import PUBLISHED as DYN_PERCEIVER
from tests.zoo.test_msdnet import PUBLISHED as MSDNET
from tests.zoo.test_uvit import PUBLISHED as UVIT

TRAINING_ONLY = {"drop_rate": 0.1, "attn_drop_rate": 0.1, "drop_path_rate": 0.2}


@pytest.mark.parametrize(
    ("kind", "published"),
    [
        (MSDNet, MSDNET),
        (DViT, DVIT),
        (DynPerceiver, DYN_PERCEIVER),
        (ADPC, ADP_C),
        (UViT, UVIT),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_hyperparameters_of_training_are_ignored(kind, published):
    weights = on_meta(kind.from_hyperparameters, published).state_dict()
    model = on_meta(kind.from_published, {**published, **TRAINING_ONLY}, weights)
    assert model.state_dict().keys() == weights.keys()
    with pytest.raises(ValueError, match="unknown: drop_rates"):
        kind.from_hyperparameters({**published, "drop_rates": 0.1})
