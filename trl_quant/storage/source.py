"""Finds the checkpoint that `trl-quant prepare` or `export` reads, on disk or the hub, and its linear layers."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..models.families import EMBEDDING, ROUTER
from ..models.linears import sampled_linears, unquantized_linears
from ..reading import reading
from .experts import NamesOnDisk
from .files import Stored, check_links, read_config, read_heads, weight_files
from .identity import MODEL_FILES
from .layout import CODE, FILES, INDEX, linear_layers
from .manifest import check_read
from .named import check_named


@dataclass(frozen=True)
class Source:
    """
    A checkpoint to read.

    Attributes:
        path (`Path`): The checkpoint's directory.
        name (`str`): Its name in a model card: its id on the hub, or the name of its directory.
        revision (`str` or `None`): Its commit on the hub.
        trust (`bool`): Whether its own Python code may run.
    """

    path: Path
    name: str
    revision: str | None
    trust: bool

    @property
    def heads(self) -> dict[str, Stored]:
        """The tensors of the checkpoint."""
        return read_heads(weight_files(self.path))

    @property
    def nbytes(self) -> int:
        """The size of its weights in bytes."""
        return sum(stored.nbytes for stored in self.heads.values())

    def skeleton(self):
        """Builds the checkpoint's model on the meta device, where weights take no memory."""
        return skeleton_of(self.path, self.trust)

    def ignored(self) -> list[str]:
        """
        Returns the names of the linear layers outside the decoder and of routers, which are never quantized. Where a
        model reads images, all matrices outside the decoder are among them, by their names on disk. What transformers
        leaves out when it loads, such as a layer for speculative decoding, is named by a pattern.
        """
        policy, matrices = self.skeleton(), [name for name, stored in self.heads.items() if len(stored.shape) == 2]
        kept = [name for name in self.heads if ROUTER.fullmatch(name)]
        if policy.config.get_text_config() is not policy.config:
            decoder = _decoder(policy)
            kept += [name for name in matrices if name not in decoder and not EMBEDDING.fullmatch(name)]
        names = (name.removesuffix(".weight") for name in kept if name.endswith(".weight"))
        return list(dict.fromkeys([*unquantized_linears(policy), *names, *_left_out(policy, self.heads)]))

    def layers(self, format: str | None = None) -> tuple[list[str], list[str]]:
        """
        Returns the names on disk of the linear layers to quantize to `format`, experts' among them, and of the others.

        Raises:
            ValueError: A layer to quantize is not a linear layer of the decoder, its experts cannot be quantized, or as
            in [`~storage.layout.linear_layers`].
        """
        policy = self.skeleton()
        decoder = {name.removesuffix(".weight") for name in _decoder(policy)}
        chosen, left = linear_layers(self.path, self.ignored(), format)
        outside = [name for name in chosen if name not in decoder]
        if outside:
            raise ValueError(
                f"source: {self.path}: `{outside[0]}` ({len(outside)} such) is not a linear layer in the decoder of "
                f"{type(policy).__name__}, and only those can be quantized."
            )
        return chosen, left


def _left_out(policy: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Returns patterns of the modules among `names` on disk that transformers' model leaves out when it loads."""
    ignored = policy._keys_to_ignore_on_load_unexpected or ()
    candidates = [name for name in names if any(re.search(pattern, name) for pattern in ignored)]
    if not candidates:
        return []
    own = {prefix for name, _ in NamesOnDisk(policy).stream(policy.named_parameters()) for prefix in _prefixes_of(name)}
    outside = (next((prefix for prefix in _prefixes_of(name) if prefix not in own), None) for name in candidates)
    return [f"re:{re.escape(prefix)}\\..*" for prefix in dict.fromkeys(outside) if prefix is not None]


def _prefixes_of(name: str) -> list[str]:
    """Returns "a", "a.b" and "a.b.c" of the name "a.b.c"."""
    return list(accumulate(name.split("."), "{}.{}".format))


def _decoder(policy: PreTrainedModel) -> set[str]:
    """Returns the names on disk of the weights of a model's quantizable layers."""
    found = sampled_linears(policy).values()
    tensors = ((layer.weight, torch.empty(layer.shape, device="meta")) for layer in found)
    return {name for name, _ in NamesOnDisk(policy).stream(tensors)}


def find_source(model: str, revision: str | None, trust: bool, option: str = "--revision") -> Source:
    """
    Finds the checkpoint called `model`: a directory, or an id on the hub, from which its files are downloaded.

    Raises:
        ValueError: There is none, a directory was given with a revision, or as in [`~storage.files.check_links`] and
        [`~storage.files.read_config`].
    """
    if Path(model).is_dir():
        if revision is not None:
            raise ValueError(f"`{option}` {revision}, but {model} is a directory, which has no revisions.")
        check_links(model)
        read_config(Path(model))
        check_read(model, MODEL_FILES, "source")
        return Source(Path(model), Path(model).resolve().name, None, trust)
    check_named("source", model, revision)
    from huggingface_hub import snapshot_download

    needed = [*FILES, INDEX, "model*.safetensors", *([CODE] if trust else [])]
    try:
        path = Path(snapshot_download(model, revision=revision, allow_patterns=needed, ignore_patterns="*/*"))
    except (OSError, ValueError) as error:
        raise ValueError(f"source: {model} is not a directory, and was not found on the hub: {error}") from error
    check_links(path)
    commit = path.name if path.parent.name == "snapshots" else None
    return Source(path, model, commit or revision, trust)


def kinds(names: list[str]) -> str:
    """Lists the last parts of the layers' names, such as `q_proj`, each once."""
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))


def load_whole(source: str | Path, of_source: dict, **given) -> PreTrainedModel:
    """
    Loads the whole model of a checkpoint. A model that reads images is loaded by the class of its architecture, as in
    TRL, because `AutoModelForCausalLM` loads the text of some alone, under other names.

    Args:
        source (`str` or `Path`): The checkpoint.
        of_source (`dict`): What finds the checkpoint and trusts its code, for its config and for its weights.
        given: Further arguments of `from_pretrained`.
    """
    with reading(source):
        config = AutoConfig.from_pretrained(source, **of_source)
        reads_images = config.get_text_config() is not config
        loader = (_architecture(config) if reads_images else None) or AutoModelForCausalLM
        return loader.from_pretrained(source, **of_source, **given)


def _architecture(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Returns transformers' class that a config names as its architecture, or `None` if transformers has none."""
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    return kind if isinstance(kind, type) and issubclass(kind, PreTrainedModel) else None


def skeleton_of(path: Path, trust_remote_code: bool = False) -> PreTrainedModel:
    """Builds the model that the config.json of a directory describes, as [`skeleton`] does."""
    with reading(path):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        return skeleton(config, trust_remote_code)


def skeleton(config: PreTrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    """Builds the model of a transformers config on the meta device, without memory for its weights."""
    with torch.device("meta"):
        if kind := _architecture(config):
            return kind(config)
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
