"""What changes a policy's weights, for the tests that its sampler follows: the same sequences for every engine."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.utils.prune as prune
from torch import nn
from training import spread


# A run whose best step is the first, and whose weights it ends with
BEST = {
    "max_steps": 3,
    "learning_rate": 2e-2,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_reward",
}
STEPS = 16


def move(model, size: float = 0.05, seed: int = 0, data: bool = False, keep: float = 1.0) -> None:
    """Adds noise to `keep` times each weight."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            change = size * torch.randn(param.shape, generator=generator).to(param)
            (param.data if data else param).mul_(keep).add_(change)


def scale(model, factor: float) -> None:
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", factor)


def worse_each_step(completions, trainer_state, **kwargs) -> list[float]:
    return [reward - trainer_state.global_step for reward in spread(completions)]


def after_the_best(trainer) -> float:
    """The mismatch of an evaluation after a run of `BEST`."""
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1") and trainer.state.global_step == 3
    return trainer.evaluate()["eval_mismatch/kl_k3"]


class Double(nn.Module):
    def forward(self, weight):
        return 2 * weight


def replace(module, factor: float = 2.0) -> None:
    module.weight = nn.Parameter(factor * module.weight.detach())


def step(model) -> None:
    """An optimizer of the user's own, on tokens of the user's own."""
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
    model(ids, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    model.zero_grad()


def prune_away(model) -> None:
    for layer in model.model.layers.modules():
        if isinstance(layer, nn.Linear):
            prune.l1_unstructured(layer, "weight", 0.9)
            prune.remove(layer, "weight")


def move_as_a_vector(model) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector + 0.1 * torch.sin(torch.arange(len(vector))), model.parameters())


def negate_through_numpy(model) -> None:
    array = model.model.layers[1].mlp.up_proj.weight.detach().numpy()
    np.negative(array, out=array)


def negate_data(model) -> None:
    weight = model.model.layers[0].mlp.gate_proj.weight
    weight.data = -weight.data


def exchange_layers(layers) -> None:
    layers[0], layers[1] = layers[1], layers[0]


# What users do to a model beside training it, and any engine follows. Each is so large that the policy moves by more
# than twice the self-check's bound also where INT8 products saturate, on a CPU without VNNI.
FOLLOWED = {
    "a new norm": lambda model: replace(model.model.norm, 0.5),
    "a new linear layer": lambda model: model.set_submodule(
        "model.layers.0.mlp.down_proj", nn.Linear(256, 128, bias=False)
    ),
    "loaded by assignment": lambda model: model.load_state_dict(
        {name: 0.7 * value for name, value in model.state_dict().items()}, assign=True
    ),
    "an optimizer step": step,
    "pruned": prune_away,
    "as a vector": move_as_a_vector,
    "through numpy": negate_through_numpy,
    "other data": negate_data,
    "layers in another order": lambda model: exchange_layers(model.model.layers),
}


def interrupt(trainer) -> None:
    """A training that Ctrl-C ends after its generation."""

    def interrupted(completions, **kwargs):
        raise KeyboardInterrupt

    rewards, trainer.reward_funcs = trainer.reward_funcs, [interrupted]
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    finally:
        trainer.reward_funcs = rewards


def changes(trainer, seed: int) -> Iterator[str]:
    """
    Makes a random sequence of weight edits, adapter switches, evaluations, interrupts, trainings and resumes, and
    yields the name of each when it is made. The policy has two adapters, "default" and "other"; the trainer saves each
    step.
    """
    rng, model = random.Random(seed), trainer.model

    def training(run) -> Callable[[], None]:
        """A run trains the adapter that it is resumed with."""
        return lambda: (model.set_adapter("default"), run())

    trainer.eval_dataset = trainer.train_dataset.select(range(2))  # one generation
    actions = {
        "edit": lambda: move(model, 0.02, rng.randrange(99)),
        "edit data": lambda: move(model, 0.02, rng.randrange(99), data=True),
        "switch": lambda: model.set_adapter(rng.choice(["default", "other"])),
        "disable": lambda: model.base_model.disable_adapter_layers(),
        "enable": lambda: model.base_model.enable_adapter_layers(),
        "merge": lambda: model.merge_adapter(),
        "unmerge": lambda: model.unmerge_adapter(),
        "scale": lambda: scale(model, rng.random() + 0.5),
        "train": training(trainer.train),
        "interrupt": training(lambda: interrupt(trainer)),
        "resume": training(lambda: trainer.train(resume_from_checkpoint=True)),
        "evaluate": trainer.evaluate,
    }
    runs, made = {"train", "interrupt", "resume"}, set()
    for _ in range(STEPS):
        layer = next(m for m in model.modules() if hasattr(m, "merged_adapters"))
        forbidden = {"disable", "switch", "scale"} | runs if layer.merged else {"unmerge"}
        forbidden |= {"merge"} | runs if layer.disable_adapters else set()
        forbidden |= set() if any(Path(trainer.args.output_dir).glob("checkpoint-*")) else {"resume"}
        allowed = [name for name in actions if name not in forbidden]
        back = ["unmerge"] if layer.merged else ["enable"] if layer.disable_adapters else allowed
        name = rng.choice([name for name in allowed if name not in made] or back)
        actions[name]()
        made.add(name)
        yield name
    assert made >= runs | {"edit", "edit data", "switch", "evaluate"}
