"""A network, its heads and its policy in one folder of safetensors and JSON.

    config.json, model.safetensors    the network, as transformers saves it
    heads.safetensors                 the heads
    policy.json                       the policy
    tokenizer.json, ...               the tokenizer, if the network reads texts
    exits.json                        the cuts, and a hash of each file above
    README.md                         what is promised, for readers

The folder is also a model repository of the Hugging Face Hub.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from json import dumps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swiftsure._lib.files import atomic_write, json_checksum, read_json, write_text
from swiftsure.certify.policy import Policy
from swiftsure.torch.cutting import CutModel
from swiftsure.torch.heads import attach_heads
from swiftsure.torch.replaying import ReplayedModel

__all__ = ["example_batch", "load", "push_to_hub", "save", "tokenizer_of"]

FORMAT, VERSION = "swiftsure-exits", 1
EXITS, HEADS, POLICY = "exits.json", "heads.safetensors", "policy.json"


def save(
    model: Any,
    folder: str | os.PathLike[str],
    policy: Policy | None = None,
    tokenizer: Any = None,
) -> None:
    """Write a model from `attach_heads`, its policy and its tokenizer to a folder.

    Each file is written whole or not at all; `exits.json` comes last, so that a folder whose
    writing was interrupted is refused.
    """
    from safetensors.torch import save_file

    if not getattr(model, "attached", None):
        raise TypeError(
            f"`model` must be a network from `attach_heads`, but got {type(model).__name__}: save"
            " its `state_dict` instead."
        )
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        if _is_pretrained(model.network):
            model.network.save_pretrained(place)
        else:
            save_file(_weights(model.network), place / "model.safetensors")
        save_file(_weights(model.heads), place / HEADS)
        if policy is not None:
            policy.save(place / POLICY)
        if tokenizer is not None:
            tokenizer.save_pretrained(place)
        hashes = {}
        for file in sorted(each for each in place.iterdir() if each.is_file()):
            hashes[file.name] = _sha256(file)
            with atomic_write(target / file.name) as temporary:
                shutil.copyfile(file, temporary)
    if policy is None:
        (target / POLICY).unlink(missing_ok=True)
    write_text(target / "README.md", _card(model, policy))
    content = {
        "format": FORMAT,
        "version": VERSION,
        "network": type(model.network).__name__,
        "cuts": model.attached,
        "files": hashes,
    }
    write_text(target / EXITS, dumps({**content, "checksum": json_checksum(content)}, indent=2))


def load(
    folder: str | os.PathLike[str],
    *,
    network: nn.Module | None = None,
    heads: Sequence[nn.Module] | None = None,
) -> tuple[CutModel | ReplayedModel, Policy | None]:
    """Return the model in a folder, in evaluation mode, and its policy if there is one.

    Parameters
    ----------
    folder : path or name
        A local folder, or the name of a repository of the Hub.
    network : nn.Module, optional
        The network to load weights into, if it is not one of transformers.
    heads : modules, optional
        Likewise for heads of your own.

    Raises
    ------
    ValueError
        If a file is missing or damaged.
    """
    place = _local(folder)
    content = read_json(place / EXITS, "a model with exits", FORMAT, VERSION)
    stored = content.pop("checksum", None)
    if stored != json_checksum(content):
        raise ValueError(f"{place / EXITS} is damaged: its checksum differs.")
    for name, expected in content["files"].items():
        file = place / name
        if not file.is_file() or _sha256(file) != expected:
            what = "damaged: its hash differs" if file.is_file() else "missing"
            raise ValueError(f"{file} is {what}; save the folder again, or download it again.")
    cuts = content["cuts"]
    plain = _network(place, content["network"], network)
    if cuts["heads"] == "custom" and heads is None:
        raise ValueError(
            "`heads` must be given for this folder: its heads are not ready-made ones."
        )
    model = attach_heads(
        plain.eval(),
        cuts["at"],
        _example(cuts["example"]),
        heads=cuts["heads"] if heads is None else heads,
        task=cuts["task"],
        output=cuts["output"] or None,
    )
    _load_weights(model.heads, place / HEADS)
    policy = Policy.load(place / POLICY) if POLICY in content["files"] else None
    return model.eval(), policy


def tokenizer_of(folder: str | os.PathLike[str]) -> Any:
    """Return the tokenizer in a folder; None if there is none."""
    place = _local(folder)
    if not (place / "tokenizer_config.json").is_file():
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(place, local_files_only=True)


def push_to_hub(folder: str | os.PathLike[str], name: str, **settings: Any) -> str:
    """Upload a saved folder to a repository of the Hub, and return the address of the commit.

    Parameters
    ----------
    name : str
        The repository, "user/model"; made if it does not exist.
    **settings
        As for `huggingface_hub.HfApi.upload_folder`.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(name, exist_ok=True)
    return str(api.upload_folder(repo_id=name, folder_path=str(folder), **settings))


def example_batch(model: Any) -> Any:
    """Return a batch of the same form as the one that the heads were attached with."""
    return _example(model.attached["example"])


def _local(folder: str | os.PathLike[str]) -> Path:
    place = Path(folder)
    if place.is_dir():
        return place
    name = str(folder)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ValueError(
            f"`folder` must be an existing folder or a repository of the Hub, but got {name!r}."
        )
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name))


def _is_pretrained(network: nn.Module) -> bool:
    return hasattr(network, "save_pretrained") and hasattr(network, "config")


def _network(place: Path, name: str, given: nn.Module | None) -> nn.Module:
    if given is not None:
        _load_weights(given, place / "model.safetensors")
        return given
    if not (place / "config.json").is_file():
        raise ValueError(
            f"`network` must be given for this folder, since {name} is not one of transformers'"
            f" networks: make one, and its weights are loaded into it (swiftsure serve FOLDER"
            f" --network module:{name})."
        )
    import transformers

    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise ValueError(f"{place / EXITS} names {name!r}, which transformers does not have.")
    found: nn.Module = kind.from_pretrained(place, local_files_only=True)
    return found


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in module.state_dict().items()}


def _load_weights(module: nn.Module, file: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        module.load_state_dict(load_file(file))
    except (SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{file} does not hold the weights that are expected ({reason})."
        ) from None


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _example(described: Any) -> Any:
    """Return a batch of the same form as the one that the heads were attached with."""
    if isinstance(described, list):
        return _tensor("", described)
    return {name: _tensor(name, form) for name, form in described.items()}


def _tensor(name: str, form: list[Any]) -> Tensor:
    shape, dtype = form
    if "mask" in name:
        return torch.ones(shape, dtype=getattr(torch, dtype))
    return torch.zeros(shape, dtype=getattr(torch, dtype))


def _card(model: CutModel | ReplayedModel, policy: Policy | None) -> str:
    """Return a page for readers of the folder."""
    promise = "No policy is stored: the full network runs." if policy is None else str(policy)
    return (
        "---\nlibrary_name: swiftsure\n---\n\n"
        f"# {type(model.network).__name__} with {model.n_exits} exits\n\n{promise}\n\n"
        "```python\nfrom swiftsure.torch import EarlyExit\n\n"
        'fast = EarlyExit.from_pretrained("this folder")\n```\n'
    )
