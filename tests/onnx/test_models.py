"""Every published network, and networks with attached heads, can be exported."""

import numpy as np
import pytest
import torch
from torch import nn

from swiftsure import onnx
from swiftsure.torch import Cascade, EarlyExit, attach_heads
from swiftsure.torch.scoring import confidence
from swiftsure.torch.staged import exit_outputs
from swiftsure_zoo import ADPC, L2WDEN, DViT, DynPerceiver, MSDNet, UViT
from tests.torch.builders import policy_of
from tests.zoo.test_adp_c import TINY as ADP_C
from tests.zoo.test_dvit import TINY as DVIT
from tests.zoo.test_dyn_perceiver import REGNET, SMALL
from tests.zoo.test_msdnet import TINY as MSDNET
from tests.zoo.test_uvit import TINY as UVIT

pytestmark = pytest.mark.slow


def images(n, side=32):
    return torch.randn(n, 3, side, side, generator=torch.Generator().manual_seed(n))


def cut_network():
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)]
    return attach_heads(nn.Sequential(*layers).eval(), ["1"], torch.zeros(2, 3, 8, 8)).eval()


def bert(heads):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64,
        vocab_size=50, num_labels=4,
    )  # fmt: skip
    network = transformers.BertForSequenceClassification(config).eval()
    at = ["bert.encoder.layer.0", "bert.encoder.layer.1"]
    return attach_heads(network, at, sentences(4), heads=heads).eval()


def sentences(n):
    generator = torch.Generator().manual_seed(n)
    ids = torch.randint(0, 50, (n, 7), generator=generator)
    mask = (torch.arange(7) < torch.randint(3, 8, (n, 1), generator=generator)).long()
    return {"input_ids": ids, "attention_mask": mask}


CASES = {
    "msdnet": (lambda: MSDNet(5, **MSDNET), images, "top1"),
    "l2w_den": (lambda: L2WDEN(5, **MSDNET), images, "top_diff"),
    "dvit": (lambda: DViT(5, **DVIT), images, "entropy"),
    "dyn_perceiver": (lambda: DynPerceiver(5, branch=REGNET, **SMALL), images, "top1"),
    "adp_c": (lambda: ADPC(5, threshold=0.5, **ADP_C), lambda n: images(n, 64), "mean_top1"),
    "uvit": (
        lambda: UViT(**UVIT),
        lambda n: (images(n, UVIT["image_size"]), torch.linspace(0, 999, n)),
        "model",
    ),
    "attached_heads": (cut_network, lambda n: images(n, 8), "top1"),
    "cascade": (
        lambda: Cascade([nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 3))]),
        lambda n: torch.randn(n, 4),
        "top1",
    ),
    "bert": (lambda: bert("linear"), sentences, "top1"),
    "bert_with_copied_heads": (lambda: bert("copy"), sentences, "top1"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_answers_as_pytorch(name, tmp_path):
    torch.manual_seed(0)
    make, data, score = CASES[name]
    model, batch = make().eval(), data(6)
    with torch.no_grad():
        outputs = list(exit_outputs(model, batch))[:-1]
        seen = torch.stack([confidence(score, output) for output in outputs], dim=1).numpy()
    # Half-way between two confidences of the first exit, so that no sample is near it.
    low, high = np.sort(seen[:, 0])[[2, 3]]
    policy = policy_of(float((low + high) / 2), model.n_exits, score=score)
    manifest = onnx.export(model, policy, tmp_path / "f", example=batch, threads=1)
    assert manifest.check.samples == 6
    fast = onnx.EarlyExit.load(tmp_path / "f")
    expected = EarlyExit(model, policy)(batch)
    out = fast(torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.numpy, batch))
    exits = expected.exits.numpy()
    # The confidences of some untrained networks hardly differ, and lie next to any threshold.
    n_near = fast.compare_exits(out.exits, exits, expected.confidences.numpy())
    assert n_near == manifest.check.near_threshold
    assert n_near == 6 or {0} < set(exits.tolist())
    same = out.exits == exits
    np.testing.assert_allclose(
        out.outputs[same], expected.outputs.numpy()[same], rtol=1e-3, atol=1e-4
    )
