"""What the library did when it was frozen, it still does: policies, studies, commands, exits."""

import pytest

from golden import cases
from golden.frozen import Frozen


@pytest.mark.parametrize("name", cases.POLICIES)
def test_policies(name, golden):
    golden("policies", name, cases.describe(cases.policy_of(name)))


@pytest.mark.parametrize("name", cases.STUDIES)
def test_studies(name, golden):
    golden("studies", name, cases.STUDIES[name]())
