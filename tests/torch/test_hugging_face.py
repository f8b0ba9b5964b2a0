"""Networks of transformers, cut without tracing: same answers, and modules that are not called."""

import copy
import pickle  # noqa: TID251
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import swiftsure as ss
from swiftsure.torch import (
    EarlyExit,
    EarlyStopping,
    Stream,
    attach_heads,
    check,
    collect,
    fingerprint,
    train_heads,
)
from tests.torch.builders import policy_of, refused

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*nested tensors"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script"),  # in transformers' DeBERTa
]

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "num_labels": 3,
}
WORDS = {**SIZES, "vocab_size": 60, "max_position_embeddings": 40}
PATCHES = {**SIZES, "image_size": 32, "patch_size": 8}
STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1], "num_labels": 3}


def sentences(n=6, length=12, seed=0):
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 50, (n, length), generator=rng)
    mask = torch.ones_like(ids)
    for row in range(1, n, 2):  # of several lengths
        mask[row, 3 + row % (length - 3) :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def images(n=6, seed=0):
    return {
        "pixel_values": torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
    }


def sounds(n=6, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return {"input_features": torch.randn(n, 8, 32, generator=rng)}


class Encoder(nn.Module):
    """PyTorch's own encoder, with and without padding."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(60, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 48, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.fc = nn.Linear(32, 3)

    def forward(self, input_ids, attention_mask=None):
        padding = None if attention_mask is None else attention_mask == 0
        return self.fc(self.encoder(self.words(input_ids), src_key_padding_mask=padding)[:, 0])


@dataclass
class Family:
    """A network's class and configuration, the name of its list of blocks, and its inputs."""

    name: str
    config: Any
    blocks: str
    batch: Any
    same_width: bool = True

    def network(self, seed=0):
        torch.manual_seed(seed)
        if self.config is None:
            return Encoder().eval()
        kind, settings = self.config
        return getattr(transformers, self.name)(getattr(transformers, kind)(**settings)).eval()

    def at(self, *numbers):
        return [f"{self.blocks}.{number}" for number in numbers]


FAMILIES = [
    Family("BertForSequenceClassification", ("BertConfig", WORDS), "bert.encoder.layer", sentences),
    Family(
        "RobertaForSequenceClassification",
        ("RobertaConfig", WORDS),
        "roberta.encoder.layer",
        sentences,
    ),
    Family(
        "DistilBertForSequenceClassification",
        (
            "DistilBertConfig",
            {"dim": 32, "n_layers": 4, "n_heads": 2, "hidden_dim": 48, "vocab_size": 60}
            | {"num_labels": 3},
        ),
        "distilbert.transformer.layer",
        sentences,
    ),
    Family(
        "DebertaV2ForSequenceClassification",
        (
            "DebertaV2Config",
            WORDS
            | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "conv_kernel_size": 3}
            | {"norm_rel_ebd": "layer_norm", "position_buckets": 8, "share_att_key": True},
        ),
        "deberta.encoder.layer",
        sentences,
    ),
    Family("ViTForImageClassification", ("ViTConfig", PATCHES), "vit.layers", images),
    Family("DeiTForImageClassification", ("DeiTConfig", PATCHES), "deit.layers", images),
    Family(
        "SwinForImageClassification",
        (
            "SwinConfig",
            {"embed_dim": 8, "depths": [1, 1, 2, 1], "num_heads": [1, 2, 2, 2], "window_size": 2}
            | {"image_size": 32, "patch_size": 2, "num_labels": 3},
        ),
        "swin.encoder.layers",
        images,
        same_width=False,
    ),
    Family(
        "ConvNextForImageClassification",
        ("ConvNextConfig", STAGES),
        "convnext.encoder.stages",
        images,
        same_width=False,
    ),
    Family(
        "ResNetForImageClassification",
        ("ResNetConfig", {"embedding_size": 8, **STAGES}),
        "resnet.encoder.stages",
        images,
        same_width=False,
    ),
    Family(
        "WhisperForAudioClassification",
        (
            "WhisperConfig",
            {"d_model": 32, "encoder_layers": 4, "encoder_attention_heads": 2, "num_labels": 3}
            | {"encoder_ffn_dim": 48, "num_mel_bins": 8, "max_source_positions": 16}
            | {"classifier_proj_size": 16, "vocab_size": 60, "pad_token_id": 0}
            | {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
            | {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32},
        ),
        "encoder.layers",
        sounds,
    ),
    Family(
        "GPT2ForSequenceClassification",  # finds its last token in the inputs
        (
            "GPT2Config",
            {"n_embd": 32, "n_layer": 4, "n_head": 2, "vocab_size": 60, "n_positions": 40}
            | {"num_labels": 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        ),
        "transformer.h",
        sentences,
    ),
    Family(
        "LlamaForSequenceClassification",  # takes a slice of its list of blocks
        ("LlamaConfig", WORDS | {"num_key_value_heads": 1, "pad_token_id": 0}),
        "model.layers",
        sentences,
    ),
    Family("TransformerEncoder", None, "encoder.layers", sentences),
]
BERT = FAMILIES[0]


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request):
    return request.param


def logits(network, batch):
    with torch.no_grad():
        returned = network(**batch)
    return returned if isinstance(returned, torch.Tensor) else returned.logits


def counted(network):
    """Return a counter of the calls of every module."""
    calls = Counter()
    for name, part in network.named_modules():
        part.register_forward_hook(lambda *_, name=name: calls.update([name]))
    return calls


# ------------------------------------------------------------------------------------ every family


def test_the_last_exit_is_the_network(family):
    network, batch = family.network(), family.batch()
    own = logits(network, batch)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    model = attach_heads(network, family.at(0, 1, 2), batch)
    with torch.no_grad():
        outputs = model(batch)
    assert [tuple(output.shape) for output in outputs] == [(6, 3)] * 4
    torch.testing.assert_close(outputs[-1], own, rtol=1e-5, atol=1e-5)
    check(model, batch)
    # The network is as it was.
    assert torch.equal(logits(network, batch), own)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not any(part._forward_hooks for part in network.modules())
    shared = dict(model.named_parameters())
    for name, value in network.named_parameters():
        assert shared[f"network.{name}"].data_ptr() == value.data_ptr()


def test_modules_after_an_exit_are_not_called(family):
    network, batch = family.network(), family.batch()
    model = attach_heads(network, family.at(0, 2), batch)
    calls = counted(network)
    with torch.no_grad():
        logits(network, batch)
        whole = Counter(calls)
        calls.clear()
        state = model.advance(0, model.begin(batch))
        model.head(0, state)
        ran = {number for number in range(4) if calls[f"{family.blocks}.{number}"]}
        assert ran == {0}
        state = model.select(state, torch.tensor([4, 1]))
        state = model.advance(1, state)
        model.head(1, state)
        ran = {number for number in range(4) if calls[f"{family.blocks}.{number}"]}
        assert ran == {0, 1, 2}
        model.advance(2, state)
    leaves = [name for name, part in network.named_modules() if not [*part.children()]]
    assert {name: calls[name] for name in leaves} == {name: whole[name] for name in leaves}


@pytest.mark.parametrize("rows", [[4, 1], [0], [5, 4, 3, 2, 1, 0]])
def test_samples_that_stay_get_their_own_answers(family, rows):
    network, batch = family.network(), family.batch()
    model = attach_heads(network, family.at(0, 1, 2), batch)
    own = logits(network, batch)
    index = torch.tensor(rows)
    for leave_after in range(3):
        with torch.no_grad():
            state = model.begin(batch)
            for k in range(model.n_exits):
                state = model.advance(k, state)
                if k == leave_after:
                    state = model.select(state, index)
        torch.testing.assert_close(
            model.head(3, state), own[index], rtol=1e-4, atol=1e-5, msg=str(leave_after)
        )


def test_a_network_that_nobody_leaves_runs_as_it_is(family):
    network, batch = family.network(), family.batch()
    model = attach_heads(network, family.at(0, 2), batch)
    fast = EarlyExit(model, policy_of(None, 3))
    calls = counted(network)
    expected = logits(network, batch)
    whole = Counter(calls)
    calls.clear()
    out = fast(batch)
    assert calls == whole
    assert torch.equal(out.outputs, expected)
    assert set(out.exits.tolist()) == {2}


def test_copied_heads(family):
    network, batch = family.network(), family.batch()
    if not family.same_width:
        with pytest.raises(ValueError, match="use 'linear'"):
            attach_heads(network, family.at(0, 2), batch, heads="copy")
        return
    model = attach_heads(network, family.at(0, 2), batch, heads="copy")
    check(model, batch)
    shared = {parameter.data_ptr() for parameter in network.parameters()}
    copied = list(model.heads.parameters())
    assert copied
    assert not any(parameter.data_ptr() in shared for parameter in copied)
    # A head answers as the network would with the rest of its blocks left out.
    short = copy.deepcopy(network)
    holder = short.get_submodule(family.blocks)
    del holder[3:]
    if hasattr(short, "encoder") and hasattr(short.encoder, "num_layers"):
        short.encoder.num_layers = 3
    with torch.no_grad():
        torch.testing.assert_close(model(batch)[1], logits(short, batch), rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------------- one family suffices


def bert(**settings):
    return BERT.network(), sentences(**settings)


def test_batches_of_other_lengths_and_without_padding():
    network, batch = bert()
    plain = {name: value for name, value in sentences(4, 9, 1).items() if name == "input_ids"}
    for example in (batch, plain):
        model = attach_heads(network, BERT.at(0, 2), example)
        for other in (sentences(5, 20, 2), sentences(1, 7, 3), plain, batch):
            with torch.no_grad():
                state = model.advance(0, model.begin(other))
                state = model.select(state, torch.tensor([len(other["input_ids"]) - 1]))
                state = model.advance(2, model.advance(1, state))
            torch.testing.assert_close(
                model.head(2, state), logits(network, other)[-1:], rtol=1e-4, atol=1e-5
            )


def test_states_hold_only_what_is_needed():
    network, batch = bert()
    model = attach_heads(network, BERT.at(0, 1, 2), batch)
    with torch.no_grad():
        state = model.begin(batch)
        for k in range(3):
            state = model.advance(k, state)
            tensors = [t for t in torch.utils._pytree.tree_leaves(state) if torch.is_tensor(t)]
            # One hidden state, and masks.
            assert sum(t.is_floating_point() and t.ndim == 3 for t in tensors) == 1
            assert len(tensors) <= 5


def test_tokenizer_batches_and_labels():
    network, batch = bert(n=40)
    encoding = transformers.BatchEncoding({**batch, "labels": torch.zeros(40, dtype=torch.long)})
    model = attach_heads(network, BERT.at(0, 2), encoding)
    record = collect(model, [encoding], losses=["zero_one", "brier"])
    assert record.n == 40
    wrong = logits(network, batch).argmax(dim=1) != 0
    np.testing.assert_array_equal(record.losses["zero_one"][:, -1], wrong.numpy())
    policy = ss.calibrate(record, risk="consistency", loss="brier", epsilon=0.5, delta=0.5)
    fast = EarlyExit(model, policy)
    out = fast(encoding)
    expected = torch.stack(model(batch), dim=1)[torch.arange(40), out.exits]
    torch.testing.assert_close(out.outputs, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(fast(batch).exits, out.exits)


def test_batches_of_a_dataset():
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    batch = sentences(n=24)
    rows = {name: value.tolist() for name, value in batch.items()}
    data = datasets.Dataset.from_dict({**rows, "labels": [0, 1, 2] * 8}).with_format("torch")
    exits = attach_heads(BERT.network(), BERT.at(0, 2), data[:2])
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    for training in (data.batch(8), loader):
        assert len(train_heads(exits, training, epochs=1, stop=EarlyStopping(training))) == 1
    record = collect(exits, data.iter(8), losses=["zero_one"])
    again = collect(exits, loader, losses=["zero_one"])
    np.testing.assert_array_equal(record.losses["zero_one"], again.losses["zero_one"])
    assert (record.n, record.n_exits) == (24, 3)


def test_streams_keep_lengths_apart():
    network, batch = bert(n=40)
    model = attach_heads(network, BERT.at(0, 2), batch)
    record = collect(model, [batch])
    fast = EarlyExit(model, ss.calibrate(record, risk="consistency", loss="brier", epsilon=0.05))
    batches = [sentences(8, length, seed) for seed, length in enumerate((12, 9, 12, 7, 9))]
    found = list(Stream(fast, 16).run(batches, ordered=True))
    for out, given in zip(found, batches, strict=True):
        one = fast(given)
        torch.testing.assert_close(out.outputs, one.outputs, rtol=1e-4, atol=1e-5)


def test_fingerprints_know_network_and_heads():
    network, batch = bert()
    torch.manual_seed(3)
    model = attach_heads(network, BERT.at(0), batch)
    first = fingerprint(model)
    assert fingerprint(copy.deepcopy(model)) == first
    with torch.no_grad():
        network.classifier.bias += 1
    assert fingerprint(model) != first
    for block, same in ((0, True), (1, False)):
        network = BERT.network()
        torch.manual_seed(3)
        assert (fingerprint(attach_heads(network, BERT.at(block), batch)) == first) is same


@pytest.mark.parametrize("heads", ["linear", "copy"])
def test_copies_and_pickles(heads):
    network, batch = bert()
    model = attach_heads(network, BERT.at(0, 2), batch, heads=heads)
    with torch.no_grad():
        expected = model(batch)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
            assert all(map(torch.equal, other(batch), expected))
            other.network.classifier.weight.zero_()
            assert torch.equal(model(batch)[-1], expected[-1])


def test_the_mode_is_the_networks():
    network, batch = bert()
    model = attach_heads(network.train(), BERT.at(0, 2), batch)
    assert all(part.training for part in model.modules())
    with torch.no_grad():
        assert not torch.equal(model(batch)[-1], model(batch)[-1])  # dropout
        network.eval()
        model.eval()
        torch.testing.assert_close(model(batch)[-1], logits(network, batch))


def test_modules_within_blocks_and_blocks_around_them():
    network, batch = bert()
    at = ["bert.encoder.layer.1.attention", "bert.encoder.layer.1", "bert.encoder", "bert.pooler"]
    model = attach_heads(network, at, batch)
    check(model, batch)
    with torch.no_grad():
        torch.testing.assert_close(model(batch)[-1], logits(network, batch))


def test_slices_of_containers():
    class Sliced(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))

        def forward(self, given):
            return {"logits": self.parts[3:](self.parts[:3](given).relu())}

    network, batch = Sliced().eval(), {"given": torch.randn(6, 4)}
    exits = attach_heads(network, ["parts.1", "parts.3"], batch)
    calls = counted(network)
    state = exits.begin(batch)
    for k in range(3):
        state = exits.advance(k, state)
        assert [calls[f"parts.{part}"] for part in range(5)] == [
            [1, 1, 0, 0, 0],
            [1, 1, 1, 1, 0],
            [1, 1, 1, 1, 1],
        ][k]
    torch.testing.assert_close(exits.head(2, state), network(**batch)["logits"])
    assert not exits.training
    assert not network.parts.training


class Prefixed(nn.Module):
    """A network that goes on from the keys and values of a prefix, (n, layers, 2, ...)."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, input_ids, attention_mask, past):
        cache = transformers.DynamicCache()
        for layer in range(past.shape[1]):
            cache.update(past[:, layer, 0], past[:, layer, 1], layer)
        return self.network(
            input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache
        )


def test_caches_of_a_prefix():
    family = next(each for each in FAMILIES if each.name.startswith("Llama"))
    network, batch = family.network(), sentences()
    batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    with torch.no_grad():
        read = network.model(input_ids=batch["input_ids"][:, :5], use_cache=True).past_key_values
    rest = {**batch, "input_ids": batch["input_ids"][:, 5:]}
    with pytest.raises(ValueError, match="'past_key_values' is a DynamicCache"):
        attach_heads(network, family.at(1), {**rest, "past_key_values": read})
    pairs = [torch.stack([layer.keys, layer.values], dim=1) for layer in read.layers]
    rest["past"] = torch.stack(pairs, dim=1)
    prefixed = Prefixed(network).eval()
    exits = attach_heads(prefixed, [f"network.{name}" for name in family.at(0, 2)], rest)
    rows = torch.tensor([4, 1])
    with torch.no_grad():
        state = exits.select(exits.advance(0, exits.begin(rest)), rows)
        state = exits.advance(2, exits.advance(1, state))
    torch.testing.assert_close(exits.head(2, state), logits(network, batch)[rows])


def test_compiled_blocks_are_run():
    network, batch = bert()
    expected = logits(network, batch)
    seen = []

    def backend(graph, inputs):
        def run(*given):
            seen.append(len(inputs))
            return graph(*given)

        return run

    for block in network.bert.encoder.layer:
        block.compile(backend=backend)
    model = attach_heads(network, BERT.at(0, 2), batch)
    seen.clear()
    with torch.no_grad():
        state = model.advance(0, model.begin(batch))
        assert len(seen) == 1
        state = model.advance(2, model.advance(1, state))
    assert len(seen) == 4
    torch.testing.assert_close(model.head(2, state), expected, rtol=1e-4, atol=1e-5)


def test_threads_share_a_model():
    from concurrent.futures import ThreadPoolExecutor

    network, _ = bert()
    model = attach_heads(network, BERT.at(0, 2), sentences())
    batches = [sentences(3 + seed % 3, 8 + seed % 5, seed) for seed in range(24)]

    def last(batch):
        with torch.no_grad():
            return model(batch)[-1]

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(last, batches))
    for out, batch in zip(found, batches, strict=True):
        torch.testing.assert_close(out, logits(network, batch), rtol=1e-4, atol=1e-5)


class Odd(nn.Module):
    """Runs one layer twice, none of another, and one for large batches only."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.unused = nn.Linear(6, 6)
        self.extra = nn.Linear(6, 6)
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        if len(x) > 8:
            x = self.extra(x)
        if float(x.sum()) > 1e9:  # not traceable
            x = x + 1
        return self.fc(self.layers[0](x))


class TokensFirst(Encoder):
    """PyTorch's default: the batch is the second axis."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 48)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, input_ids, attention_mask):
        hidden = self.words(input_ids).transpose(0, 1)
        return self.fc(self.encoder(hidden, src_key_padding_mask=attention_mask == 0)[0])


@pytest.mark.parametrize("heads", ["linear", "copy"])
def test_networks_with_the_batch_on_the_second_axis(heads):
    torch.manual_seed(0)
    network, batch = TokensFirst().eval(), sentences()
    model = attach_heads(network, ["encoder.layers.0", "encoder.layers.2"], batch, heads=heads)
    check(model, batch)
    with torch.no_grad():
        torch.testing.assert_close(model(batch)[-1], network(**batch))


class Mixing(nn.Module):
    """Passes a tensor with several rows per sample along."""

    def __init__(self):
        super().__init__()
        self.pairs = nn.Unflatten(0, (-1, 1))
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.fc = nn.Linear(6, 3)

    def forward(self, input_ids):
        twice = self.pairs(torch.cat([input_ids, input_ids]).flatten(0, 0))
        x = self.layers[1](self.layers[0](input_ids)) + twice[: len(input_ids), 0]
        return self.fc(x)


def test_tensors_that_mix_samples_are_refused():
    with pytest.raises(ValueError, match="mixes samples"):
        attach_heads(Mixing().eval(), ["layers.0"], {"input_ids": torch.randn(4, 6)})


def test_what_cannot_be_cut_says_what_can():
    x = torch.randn(4, 6)
    network = Odd().eval()
    with pytest.raises(ValueError, match=r"run 2 times .*after layers.1, layers.2"):
        attach_heads(network, ["layers.0"], x)
    with pytest.raises(ValueError, match=r"does not run unused. It can be cut after layers.0"):
        attach_heads(network, ["unused"], x)
    with pytest.raises(ValueError, match=r"It can be cut after bert.encoder.layer.0, .*layer.3"):
        attach_heads(BERT.network(), ["bert.encoder.layers.0"], sentences())
    with refused("at"):
        attach_heads(network, "layers.1", x)
    with pytest.raises(ValueError, match="order"):
        attach_heads(network, ["layers.2", "layers.1"], x)
    model = attach_heads(network, ["layers.1"], x)
    with torch.no_grad():
        torch.testing.assert_close(model(x)[-1], network(x))
    with pytest.raises(ValueError, match="did not run 'extra' for this batch"):
        attach_heads(network, ["layers.1", "extra"], torch.randn(9, 6))


def test_code_between_modules_that_changes_its_output_is_refused():
    class Random(Odd):
        def forward(self, x):
            return super().forward(x) + torch.rand(())

    with pytest.raises(ValueError, match="random numbers"):
        attach_heads(Random().eval(), ["layers.1"], torch.randn(4, 6))


class Longer(nn.Module):
    """Adds its embeddings again at the end, for long texts only."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(60, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.fc = nn.Linear(8, 3)

    def forward(self, input_ids):
        first = self.words(input_ids)
        x = self.layers[1](self.layers[0](first).relu())
        return self.fc((x + first if input_ids.shape[1] > 12 else x).mean(dim=1))


def test_values_that_only_other_batches_need_give_an_error_not_another_answer():
    torch.manual_seed(0)
    network = Longer().eval()
    short = {"input_ids": torch.randint(0, 60, (40, 8))}
    model = attach_heads(network, ["layers.0"], short)
    policy = ss.calibrate(
        collect(model, [short]), risk="consistency", loss="brier", epsilon=0.5, delta=0.5
    )
    fast = EarlyExit(model, policy.model_copy(update={"threshold": 1.0}))
    torch.testing.assert_close(fast(short).outputs, network(**short))
    with pytest.raises(ValueError, match="NaN"):
        fast({"input_ids": torch.randint(0, 60, (4, 20))})
