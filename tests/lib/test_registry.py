"""The registry, through which losses, scores, bounds, risks and text families are added."""

import pytest

from swiftsure._lib.registry import Registry
from swiftsure.certify.bounds import BOUNDS
from swiftsure.curves.risks import RISKS
from swiftsure.losses import LOSSES, ZERO_ONE
from swiftsure.scores import AGGREGATES, IMAGE_SCORES, SCORES


def double(x):
    return 2 * x


def triple(x):
    return 3 * x


def test_names_of_functions_of_items_and_given_ones():
    registry = Registry("rule", double)
    assert registry.register(triple, "triple", "thrice") is triple
    assert registry == {"double": double, "triple": triple, "thrice": triple}
    assert LOSSES[ZERO_ONE.name] is ZERO_ONE
    with pytest.raises(ValueError, match="`rule` must have a name of its own, but 'double' is"):
        registry.register(triple, "double")
    assert registry.register(double) is double  # again


def test_items_are_chosen_by_name_or_given():
    assert LOSSES.choose("zero_one") is LOSSES.choose(ZERO_ONE) is ZERO_ONE
    with pytest.raises(ValueError, match=r"`losses` must be one of: .* Did you mean 'zero_one'\?"):
        LOSSES.choose("zero-one", "losses")
    with pytest.raises(ValueError, match=r"`loss` must be one of: .* got '3'"):
        LOSSES.choose(3)


def test_everything_is_registered_in_one_way():
    assert {type(each) for each in (LOSSES, SCORES, AGGREGATES, IMAGE_SCORES, BOUNDS, RISKS)} == {
        Registry
    }
