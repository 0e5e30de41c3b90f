r"""
Finds the operators at which the trainer's and the engine's activations differ.

Activations are compared at points. A point is the output of a linear layer, a norm or the embeddings; the input of one
of these, if no other point has the same tensor (the result of attention before `o_proj`, of the activation before
`down_proj`, a residual sum before a norm); or the logits. The operator of a point computes it from earlier points. A
sequence passes through three forward passes:

    b = f(b of the points before)       the trainer's operators
    a = g(a of the points before)       the engine's operators
    c = f(a of the points before)       the trainer's operators on the engine's inputs

| measure | formula | |
|---|---|---|
| error | norm(a - b) / norm(b) | the error that an operator inherits plus the error that it adds |
| added | norm(a - c) / norm(c) | the error that it adds |
| same | share of elements with a = b, or a = c | |

The third pass is a forward pass of the trainer in which each point, once measured, is overwritten with the engine's
value.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ...layers import EngineExperts, EngineLinear
from ...models.names import clean_name
from ..base import RolloutEngine
from ..tensors import outer_modules


LOGITS, INPUT = "logits", ".input"
LAYER = re.compile(r"(?:.*\.)?(layers\.(\d+))(?:\.|$)")


@dataclass
class Difference:
    """The difference between tensors and their references, summed over all pairs that are added."""

    square: float = 0.0
    reference: float = 0.0
    equal: int = 0
    count: int = 0

    def add(self, tensor: Tensor, reference: Tensor) -> None:
        """Adds a pair of tensors of one shape."""
        tensor, reference = tensor.float(), reference.float()
        self.square += (tensor - reference).square().sum(dtype=torch.float64).item()
        self.reference += reference.square().sum(dtype=torch.float64).item()
        self.equal += (tensor == reference).sum().item()
        self.count += tensor.numel()

    @property
    def error(self) -> float:
        """Relative error in the Frobenius norm."""
        return (self.square / self.reference) ** 0.5 if self.reference else float(self.square > 0)

    @property
    def same(self) -> float:
        """Share of elements that are equal."""
        return self.equal / self.count


@dataclass
class Point:
    """
    A point at which activations are compared.

    Attributes:
        name (`str`):
            Name of the module whose output the point is. It ends in `.input` for the module's input; `layers.3` is the
            residual sum that leaves this layer.
        layer (`int` or `None`): Index of the decoder layer that the operator belongs to.
        total ([`Difference`]): The engine's activations against the trainer's, a against b.
        added ([`Difference`]): The engine's activations against the trainer's operator on the same input, a against c.
    """

    name: str
    layer: int | None = None
    total: Difference = field(default_factory=Difference)
    added: Difference = field(default_factory=Difference)


class Comparison:
    """
    The comparison of a policy's activations with those of its engine.

    Parameters:
        engine ([`RolloutEngine`]): The engine, with the policy's weights. A vLLM engine must be in this process, on one
            device, and run eagerly.

    Attributes:
        points (`dict[str, Point]`): The points, in the order of the trainer's forward pass.
        missing (`list[str]`): Points that the engine lacks. The next point's operator includes their error.
    """

    def __init__(self, engine: RolloutEngine):
        self.engine, self.policy = engine, engine.weights.base_model
        self.modules = operators(self.policy)
        self.points: dict[str, Point] = {}
        self.missing: list[str] = []

    @torch.no_grad()
    def add(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Adds one sequence. Returns the trainer's and the engine's logits, each of shape (tokens, vocabulary)."""
        trainer: dict[str, Tensor] = {}
        seen: dict[tuple, Tensor] = {}  # holds the tensors, so that no other tensor gets the same memory

        def record(name: str, tensor: Tensor) -> None:
            key = tensor.data_ptr(), tensor.numel()
            is_known = name.endswith(INPUT) and (key in seen or not tensor.is_floating_point())
            if not is_known and _is_of_tokens(tensor, len(tokens)):
                seen[key], trainer[name] = tensor, tensor.reshape(len(tokens), -1)

        self._forward(tokens, record)
        found = self._engine_activations(tokens, list(trainer))
        engine = {name: a.to(trainer[name].device) for name, a in found.items() if a.shape == trainer[name].shape}
        self._create_points(list(trainer), engine)
        for name, a in engine.items():
            self.points[name].total.add(a, trainer[name])
        logits = trainer[LOGITS]
        trainer.clear()
        seen.clear()

        def replace(name: str, tensor: Tensor) -> None:
            if name in engine and _is_of_tokens(tensor, len(tokens)):
                self.points[name].added.add(engine[name], tensor.reshape(len(tokens), -1))
                tensor.copy_(engine[name].view(tensor.shape))  # in place, so that the residual stream has it too

        self._forward(tokens, replace)
        return logits, engine[LOGITS]

    def _forward(self, tokens: list[int], observe: Callable[[str, Tensor], None]) -> None:
        """Runs the trainer's forward pass; `observe` gets the name and the tensor of each point."""
        accelerator = self.engine.accelerator
        with accelerator.autocast(), hooked(self.modules, observe):
            logits = self.policy(input_ids=torch.tensor([tokens], device=accelerator.device), use_cache=False).logits
        observe(LOGITS, logits)

    def _engine_activations(self, tokens: list[int], names: list[str]) -> dict[str, Tensor]:
        """Returns the engine's activations, each of shape (tokens, features), at the points that it has."""
        if not hasattr(self.engine, "copy"):
            from ..vllm.activations import activations

            return activations(self.engine, tokens, names)
        found: dict[str, Tensor] = {}
        wanted = set(names)

        def record(name: str, tensor: Tensor) -> None:
            if name in wanted:
                found[name] = tensor.reshape(len(tokens), -1)

        accelerator = self.engine.accelerator
        with accelerator.autocast(), hooked(operators(self.engine.copy), record):
            ids = torch.tensor([tokens], device=accelerator.device)
            record(LOGITS, self.engine.copy(input_ids=ids, use_cache=False).logits)
        return found

    def _create_points(self, names: list[str], found: dict[str, Tensor]) -> None:
        """Creates the points at the first sequence, from the names of the trainer's and the engine's activations."""
        if self.points:
            return
        previous_layer = None
        for name in names:
            place = LAYER.match(name)
            if place is None:
                layer, label = None, name.removeprefix("model.")
            else:
                layer, label = int(place[2]), name[place.start(1) :]
            if name.endswith(INPUT) and previous_layer is not None and layer != previous_layer:
                layer, label = previous_layer, f"layers.{previous_layer}"  # the residual sum that leaves that layer
            previous_layer = layer
            if name in found:
                self.points[name] = Point(label, layer)
            else:
                self.missing.append(label)


def _is_of_tokens(tensor: Tensor, tokens: int) -> bool:
    """Whether a tensor has values of each token: (1, tokens, ...), or (tokens, features) as in a mixture of experts."""
    return tensor.shape[:2] == (1, tokens) or (tensor.ndim == 2 and len(tensor) == tokens)


def operators(model: nn.Module) -> dict[str, nn.Module]:
    """
    Returns the modules with weights, by their names in the policy. A layer and its adapter count as one module, and so
    do the experts of a layer.
    """
    found = {}
    for name, module in outer_modules(model):
        has_weights = isinstance(module, BaseTunerLayer | EngineLinear) or any(
            True for _ in module.parameters(recurse=False)
        )
        has_weights |= any(isinstance(child, EngineExperts) for child in module.children())
        if has_weights and module is not model.get_output_embeddings():  # its output, the logits, is a point already
            found[clean_name(name)] = module
    return found


@contextmanager
def hooked(modules: dict[str, nn.Module], observe: Callable[[str, Tensor], None]) -> Iterator[None]:
    """
    Context in which `observe` is called with each module's input, named `name.input`, and its output; of a router, with
    its logits.
    """

    def see(name: str, output: Tensor | tuple[Tensor, ...]) -> None:
        observe(name, output if isinstance(output, Tensor) else output[0])

    handles = []
    for name, module in modules.items():
        handles.append(module.register_forward_pre_hook(lambda _, args, name=name: observe(name + INPUT, args[0])))
        handles.append(module.register_forward_hook(lambda _, args, output, name=name: see(name, output)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
