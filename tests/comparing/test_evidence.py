"""What `compare` chooses among real number formats of a language model."""

from pathlib import Path

import numpy as np
import pytest

from experiments.quantisation.compare import choices, load, violations

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "quantisation" / "coqa.npz"


@pytest.mark.slow
@pytest.mark.skipif(not DATA.exists(), reason=f"needs the scores of 48 number formats, {DATA.name}")
def test_300_labels_certify_nearly_the_fewest_bits():
    columns, costs = load(DATA)
    chosen = choices(columns, costs, n=300, correction="fixed_sequence", draws=40)
    assert np.mean([costs[name] for name in chosen]) < 5.4  # 5.16 is the best possible
    assert violations(columns, chosen) == 0
