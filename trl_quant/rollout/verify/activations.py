r"""
Where the trainer's and the engine's activations part, operator by operator.

Points are the outputs of linear layers, norms and embeddings, the inputs of those that no such output is (of `o_proj`,
attention's result; of `down_proj`, the activation's; of a norm, a residual sum), and the logits. The operator at a
point is what computes it from the points before. A sequence passes three times:

    b = f(b of the points before)       the trainer's
    a = g(a of the points before)       the engine's
    c = f(a of the points before)       the trainer's operator, on what the engine's got

| measure | formula | |
|---|---|---|
| error | norm(a - b) / norm(b) | what an operator inherits, and what it adds |
| added | norm(a - c) / norm(c) | what it adds |
| same | share of elements with a = b, or a = c | |

The third pass is a forward of the trainer's in which each point, once it is measured, is overwritten with the engine's.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ...layers import QuantizedLinear
from ...models.names import clean_name
from ..trl_adapter import RolloutEngine


LOGITS, INPUT = "logits", ".input"
LAYER = re.compile(r"(?:.*\.)?(layers\.(\d+))(?:\.|$)")


@dataclass
class Difference:
    """Of one tensor from another, over all that are added."""

    square: float = 0.0
    reference: float = 0.0
    equal: int = 0
    count: int = 0

    def add(self, tensor: Tensor, reference: Tensor) -> None:
        tensor, reference = tensor.float(), reference.float()
        self.square += (tensor - reference).square().sum(dtype=torch.float64).item()
        self.reference += reference.square().sum(dtype=torch.float64).item()
        self.equal += (tensor == reference).sum().item()
        self.count += tensor.numel()

    @property
    def error(self) -> float:
        """Relative, in the Frobenius norm."""
        return (self.square / self.reference) ** 0.5 if self.reference else float(self.square > 0)

    @property
    def same(self) -> float:
        """Share of elements that are equal."""
        return self.equal / self.count


@dataclass
class Point:
    """
    What an operator puts out.

    Attributes:
        name (`str`): Of the module whose output it is, or whose input where it ends in `.input`; `layers.3` for a sum
            that leaves a layer.
        layer (`int` or `None`): The decoder layer whose operator it is.
        total ([`Difference`]): Of the engine's from the trainer's.
        added ([`Difference`]): Of the engine's from the trainer's operator on the engine's input.
    """

    name: str
    layer: int | None = None
    total: Difference = field(default_factory=Difference)
    added: Difference = field(default_factory=Difference)


class Comparison:
    """
    Of a policy's activations with those of its engine.

    Parameters:
        engine ([`RolloutEngine`]): The engine, with the policy's weights. One of vLLM's must be in this process, on one
            device, and run eagerly.

    Attributes:
        points (`dict[str, Point]`): In the order in which the trainer's forward reaches them.
        missing (`list[str]`): Points that the engine does not have; what they add counts for the next one.
    """

    def __init__(self, engine: RolloutEngine):
        self.engine, self.policy = engine, engine.weights.base_model
        self.modules = operators(self.policy)
        self.points: dict[str, Point] = {}
        self.missing: list[str] = []

    @torch.no_grad()
    def add(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Compares over one sequence; returns the trainer's and the engine's logits, (tokens, vocabulary)."""
        trainer: dict[str, Tensor] = {}
        seen: dict[tuple, Tensor] = {}  # alive, lest their memory be used again

        def note(name: str, tensor: Tensor) -> None:
            key = tensor.data_ptr(), tensor.numel()
            known = name.endswith(INPUT) and (key in seen or not tensor.is_floating_point())
            if not known and tensor.shape[:2] == (1, len(tokens)):
                seen[key], trainer[name] = tensor, tensor.reshape(len(tokens), -1)

        self._forward(tokens, note)
        engine = self._engines(tokens, list(trainer))
        engine = {name: a.to(trainer[name].device) for name, a in engine.items() if a.shape == trainer[name].shape}
        self._name(list(trainer), engine)
        for name, a in engine.items():
            self.points[name].total.add(a, trainer[name])
        logits = trainer[LOGITS]
        trainer.clear()
        seen.clear()

        def replace(name: str, tensor: Tensor) -> None:
            if name in engine and tensor.shape[:2] == (1, len(tokens)):
                self.points[name].added.add(engine[name], tensor.reshape(len(tokens), -1))
                tensor.copy_(engine[name].view(tensor.shape))  # in place: the residual stream goes on with it too

        self._forward(tokens, replace)
        return logits, engine[LOGITS]

    def _forward(self, tokens: list[int], see: Callable[[str, Tensor], None]) -> None:
        """The trainer's forward."""
        accelerator = self.engine.accelerator
        with accelerator.autocast(), hooked(self.modules, see):
            logits = self.policy(input_ids=torch.tensor([tokens], device=accelerator.device), use_cache=False).logits
        see(LOGITS, logits)

    def _engines(self, tokens: list[int], names: list[str]) -> dict[str, Tensor]:
        """The engine's activations, (tokens, features), of those points that it has."""
        if not hasattr(self.engine, "copy"):
            from ..vllm.activations import activations

            return activations(self.engine, tokens, names)
        found: dict[str, Tensor] = {}
        wanted = set(names)

        def note(name: str, tensor: Tensor) -> None:
            if name in wanted:
                found[name] = tensor.reshape(len(tokens), -1)

        accelerator = self.engine.accelerator
        with accelerator.autocast(), hooked(operators(self.engine.copy), note):
            ids = torch.tensor([tokens], device=accelerator.device)
            note(LOGITS, self.engine.copy(input_ids=ids, use_cache=False).logits)
        return found

    def _name(self, names: list[str], found: dict[str, Tensor]) -> None:
        """Makes the points, at the first sequence."""
        if self.points:
            return
        before = None
        for name in names:
            place = LAYER.match(name)
            layer, label = (
                (None, name.removeprefix("model.")) if place is None else (int(place[2]), name[place.start(1) :])
            )
            if name.endswith(INPUT) and before is not None and layer != before:
                layer, label = before, f"layers.{before}"  # the sum that leaves the layer before
            before = layer
            if name in found:
                self.points[name] = Point(label, layer)
            else:
                self.missing.append(label)


def operators(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with weights, by their names in the policy; a layer and its adapter are one."""
    found, adapted = {}, None
    for name, module in model.named_modules():
        if adapted is not None and name.startswith(adapted):
            continue
        if isinstance(module, BaseTunerLayer):
            adapted = f"{name}."
        elif not isinstance(module, QuantizedLinear) and not any(True for _ in module.parameters(recurse=False)):
            continue
        if module is not model.get_output_embeddings():  # what is compared are the logits
            found[clean_name(name)] = module
    return found


@contextmanager
def hooked(modules: dict[str, nn.Module], see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Context in which `see` gets the input of each module, as `name.input`, and its output, as they come."""
    handles = []
    for name, module in modules.items():
        handles.append(module.register_forward_pre_hook(lambda _, args, name=name: see(name + INPUT, args[0])))
        handles.append(module.register_forward_hook(lambda _, args, output, name=name: see(name, output)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
