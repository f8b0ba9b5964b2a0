"""Exits are trained in loops of other libraries, and from cached features."""

import itertools

import pytest
import torch
from torch import nn

from swiftsure.torch import EarlyStopping, Staged, attach_heads, exit_losses, train_heads


def network():
    torch.manual_seed(0)
    layers = (nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    return nn.Sequential(*layers)


def exits(heads="linear"):
    model = network().eval()
    torch.manual_seed(1)
    return attach_heads(model, ["1", "3"], torch.zeros(2, 6), heads=heads)


@pytest.fixture
def loader():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(96, 6, generator=generator)
    labels = inputs[:, :3].argmax(dim=1)
    return list(zip(inputs.split(16), labels.split(16), strict=True))


def weights(model):
    return torch.cat([each.detach().flatten() for each in model.heads.parameters()])


def test_losses_of_all_exits(loader):
    model = exits()
    losses = exit_losses(model, loader[0], distill=0.0)
    outputs = model(loader[0][0])
    expected = [nn.functional.cross_entropy(each, loader[0][1]) for each in outputs]
    torch.testing.assert_close(losses, torch.stack(expected))


def test_an_own_loop_trains_network_and_heads(loader):
    model = exits().train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    first = sum(exit_losses(model, batch).mean().item() for batch in loader)
    for batch in itertools.chain(*[loader] * 20):
        optimizer.zero_grad()
        exit_losses(model, batch).mean().backward()
        optimizer.step()
    assert sum(exit_losses(model, batch).mean().item() for batch in loader) < first / 2


def test_without_labels_the_exits_learn_the_last_one(loader):
    losses = exit_losses(exits(), loader[0][0])
    assert losses.shape == (3,)


def test_a_share_out_of_range_is_refused(loader):
    with pytest.raises(ValueError, match=r"`distill` must be in \[0, 1\], but got 2"):
        exit_losses(exits(), loader[0], distill=2)


@pytest.mark.parametrize("heads", ["linear", "mlp"])
def test_cached_features_train_the_same_heads(loader, heads):
    plain, cached = exits(heads), exits(heads)
    first = train_heads(plain, loader, epochs=3, stop=EarlyStopping(loader[:2]))
    second = train_heads(cached, loader, epochs=3, stop=EarlyStopping(loader[:2]), frozen="cached")
    torch.testing.assert_close(weights(cached), weights(plain))
    assert second[-1]["loss"] == pytest.approx(first[-1]["loss"])


def test_cached_features_run_the_network_once(loader):
    model, runs = exits(), []
    # The last layer is only in the last piece, and the network itself is not called.
    model.network[4].register_forward_hook(lambda *_: runs.append(1))
    train_heads(model, loader, epochs=5, frozen="cached")
    assert len(runs) == len(loader)


def test_cached_features_of_transformers(loader):
    pytest.importorskip("transformers")
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = BertConfig(vocab_size=20, intermediate_size=16, num_labels=3, **sizes)
    model = BertForSequenceClassification(config).eval()
    ids = torch.randint(1, 20, (12, 5))
    mask = torch.ones(12, 5, dtype=torch.long)
    mask[::2, 3:] = 0
    batches = [{"input_ids": ids, "attention_mask": mask}]
    found = []
    for frozen in (True, "cached"):
        torch.manual_seed(1)
        staged = attach_heads(model, ["bert.encoder.layer.0", "bert.encoder.layer.1"], batches[0])
        train_heads(staged, batches, epochs=3, frozen=frozen)
        found.append(weights(staged))
    torch.testing.assert_close(*found)


def test_heads_that_do_not_pool_are_not_cached(loader):
    model = attach_heads(network().eval(), ["1"], torch.zeros(2, 6), heads=[nn.Linear(16, 3)])
    with pytest.raises(ValueError, match="`frozen` must be True, not 'cached'"):
        train_heads(model, loader, epochs=1, frozen="cached")
    with pytest.raises(ValueError, match="`frozen` must be"):
        train_heads(model, loader, epochs=1, frozen="always")


def test_several_processes_share_their_gradients(loader):
    """A wrapper's own call must run: DistributedDataParallel shares gradients there."""

    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module, self.calls = module, 0

        def forward(self, inputs):
            self.calls += 1
            return self.module(inputs)

    wrapped = Wrapper(exits())
    losses = exit_losses(wrapped, loader[0])
    assert wrapped.calls == 1
    torch.testing.assert_close(losses, exit_losses(wrapped.module, loader[0]))


def test_any_staged_model_has_losses(loader):
    torch.manual_seed(0)
    model = Staged.from_sequential(
        [nn.Linear(6, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)]
    )
    assert exit_losses(model, loader[0]).shape == (2,)


@pytest.mark.filterwarnings("ignore")  # of Lightning's own
def test_heads_are_trained_and_saved_beside_a_lightning_module(loader, tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from swiftsure.torch.lightning import ExitHeads

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network()

        def training_step(self, batch, index):
            return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 1e-2)

    def trainer(callbacks):
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        options = {"max_epochs": 8, "accelerator": "cpu", "default_root_dir": tmp_path}
        return lightning.Trainer(callbacks=callbacks, **options, **quiet)

    module = Module()
    alone = Module()
    data = torch.utils.data.DataLoader(loader, batch_size=None)
    trainer([]).fit(alone, data)
    heads = ExitHeads(attach_heads(module.network, ["1", "3"], loader[0][0]))
    before = weights(heads.exits).clone()
    run = trainer([heads])
    run.fit(module, data)
    assert not torch.equal(weights(heads.exits), before)
    torch.testing.assert_close(module.network[0].weight, alone.network[0].weight)  # undisturbed
    run.save_checkpoint(tmp_path / "checkpoint.ckpt")
    again = ExitHeads(attach_heads(Module().network, ["1", "3"], loader[0][0]))
    content = torch.load(tmp_path / "checkpoint.ckpt", weights_only=False)
    again.load_state_dict(content["callbacks"]["ExitHeads"])
    torch.testing.assert_close(weights(again.exits), weights(heads.exits))
