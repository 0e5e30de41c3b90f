"""Weights are not the function: what acts in the policy beside its weights is in no copy, and stops the run.

The embedded engine is compared with the policy at its first generation, and again when what can be seen of the policy's
function changes. A sound run passes at a difference of exactly 0, in every precision and with every way to train.
"""

from types import MethodType

import pytest
import torch
from datasets import Dataset
from long_tests import rest_is_long
from tiny import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from training import config, dataset, lora, make
from transformers import PreTrainedTokenizerFast, TrainerCallback

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.precisions import PRECISIONS
from trl_quant.rollout.embedded import transformers_engine
from trl_quant.rollout.function import first_change, function_of
from trl_quant.rollout.verify.copy_check import copy_check
from trl_quant.rollout.verify.rows import check_sequences, own_rows
from trl_quant.rollout.verify.self_check import FLOOR


def base(model) -> nn.Module:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def hook_of_a_layer(model) -> None:
    base(model).model.layers[0].register_forward_hook(lambda module, args, output: output * 1.3)


def hook_of_a_linear_layer(model) -> None:
    base(model).model.layers[1].mlp.down_proj.register_forward_hook(lambda module, args, output: output * 1.5)


def hook_before_a_norm(model) -> None:
    norm = base(model).model.layers[1].input_layernorm
    norm.register_forward_pre_hook(lambda module, args: (args[0].flip(-1),))


def hook_with_keywords(model) -> None:
    mlp = base(model).model.layers[1].mlp
    mlp.register_forward_hook(lambda module, args, kwargs, output: output * 2, with_kwargs=True)


def activation(model) -> None:
    base(model).model.layers[0].mlp.act_fn = nn.Tanh()


def scaling(model) -> None:
    base(model).model.layers[0].self_attn.scaling *= 2


def epsilon(model) -> None:
    base(model).model.norm.variance_epsilon = 1.0


def forward_of_a_module(model) -> None:
    norm = base(model).model.layers[1].input_layernorm
    norm.forward = lambda x, forward=norm.forward: forward(x).flip(-1)


def config_that_is_read(model) -> None:
    """Gemma's cap on logits is read from the config in each forward pass."""
    base(model).config.final_logit_softcapping = 0.5


OWN = [value for value in list(globals().values()) if getattr(value, "__module__", "") == __name__]
CHANGES = [value for value in OWN if value is not base]
ADAPTED = [hook_of_a_linear_layer, epsilon]  # tried with an adapter too


def embedded(tmp_path, model=None, **overrides) -> QuantGRPOTrainer:
    given = {
        name: overrides.pop(name) for name in ("callbacks", "peft_config", "processing_class") if name in overrides
    }
    args = config(QuantGRPOConfig, tmp_path, **{"rollout_precision": "int8", "max_steps": 3} | overrides)
    return make(QuantGRPOTrainer, args, model=model, **given)


@pytest.fixture
def checks(monkeypatch) -> list[dict]:
    """The results of all checks of a copy."""
    found = []

    def check(engine):
        found.append(copy_check(engine))
        return found[-1]

    monkeypatch.setattr(transformers_engine, "copy_check", check)
    return found


@pytest.mark.parametrize(
    "settings",
    [
        *rest_is_long([{"rollout_precision": name} for name in PRECISIONS if PRECISIONS[name].format]),
        *rest_is_long([{"bf16": True}, {"gradient_checkpointing": True}]),
        {"rollout_precision": "int8", "train_precision": "int8"},
        *rest_is_long([{"noise_schedule": "exponential"}, {"peft_config": lora()}]),
        *rest_is_long(
            [
                {"rollout_precision": "nvfp4", "train_precision": "nvfp4", "peft_config": lora()},
                {"rollout_precision": "nvfp4", "train_precision": "nvfp4"},
            ]
        ),
    ],
    ids=lambda settings: "-".join(settings),
)
def test_a_sound_run_is_checked_once(tmp_path, checks, settings):
    embedded(tmp_path, **settings).train()
    assert [found["logp_difference"] for found in checks] == [0.0]


@pytest.mark.parametrize(
    ("change", "adapted"), [*((change, False) for change in CHANGES), *((change, True) for change in ADAPTED)]
)
def test_a_change_before_the_first_generation(tmp_path, change, adapted):
    family = "gemma2" if change is config_that_is_read else "qwen3"
    trainer = embedded(tmp_path, tiny_model(family, seed=3), peft_config=lora() if adapted else None)
    change(trainer.model)
    bound = "0." if change is forward_of_a_module else f"{FLOOR:.4f}"  # a module with a `forward` of its own may round
    with pytest.raises(RuntimeError, match=f"another function than the copy .* and {bound}.* can be explained"):
        trainer.train()


class Changing(TrainerCallback):
    """Changes the policy after the second step."""

    def __init__(self, change):
        self.change = change

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 2:
            self.change(model)


@pytest.mark.parametrize("change", [hook_of_a_layer, activation, scaling, epsilon], ids=lambda change: change.__name__)
def test_a_change_during_the_run(tmp_path, checks, change):
    trainer = embedded(tmp_path, callbacks=[Changing(change)])
    with pytest.raises(RuntimeError, match=r"failed at step 2.*another function than the copy.*Look at `model"):
        trainer.train()
    assert [found["logp_difference"] for found in checks] == [0.0]


def test_a_change_without_effect(tmp_path, checks):
    """A hook that only watches is compared, and the run goes on."""

    def watch(model) -> None:
        model.model.layers[0].register_forward_hook(lambda module, args, output: None)

    embedded(tmp_path, callbacks=[Changing(watch)]).train()
    assert [found["logp_difference"] for found in checks] == [0.0, 0.0]


def test_a_copy_with_other_weights(tmp_path):
    """A broken engine is found by the same check."""
    trainer = embedded(tmp_path)
    engine = trainer.vllm_generation.engine
    engine.sync()
    engine.ask_prompts = lambda: [[70, 71, 72, 73]]
    assert copy_check(engine)["logp_difference"] == 0
    engine.copy.model.layers[1].input_layernorm.weight.data.mul_(1.5)
    with pytest.raises(RuntimeError, match="can be explained"):
        copy_check(engine)


@pytest.mark.parametrize("noise", [{}, {"noise_schedule": "exponential"}])
def test_a_copy_that_is_no_number(tmp_path, noise):
    """With noise the bound comes from a second pass of the copy, and would be infinite. The policy is sound."""
    engine = embedded(tmp_path, **noise).vllm_generation.engine
    engine.sync()
    copy_check(engine)
    for model, says in ((engine.copy, "computes another function than the copy"), (engine.model, "policy itself is b")):
        hook = model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * torch.nan)
        with pytest.raises(RuntimeError, match=says):
            copy_check(engine)
        hook.remove()


def test_what_is_seen():
    model, other = tiny_model(seed=3), tiny_model(seed=4)
    assert function_of(model) == function_of(model.train()) == function_of(other)
    before = function_of(model)
    for name, change in {"model.norm": epsilon, "model.layers.0.mlp.act_fn": activation}.items():
        change(model)
        assert first_change(before, function_of(model)) == name
        before = function_of(model)


# The rows that are compared


@pytest.mark.parametrize("library", ["deepspeed.runtime.zero", "mine"])
def test_what_zero_registers_in_each_step_is_no_change(library):
    """Hooks and functions that are made anew, and where the weights are; the same of one's own module is a change."""
    model = tiny_model()
    layer = model.model.layers[0]

    def register(count: int):
        def hook(module, args):
            return count

        hook.__module__ = library
        handle = layer.register_forward_pre_hook(hook)
        layer.all_parameters = hook
        return handle

    handle = register(1)
    layer.ds_id = layer.applied_pre_backward_ref_cnt = 1
    before = function_of(model)
    handle.remove()
    register(2)
    layer.ds_id = layer.applied_pre_backward_ref_cnt = 2
    assert (function_of(model) == before) == (library != "mine")
    layer.scale = 2
    assert function_of(model) != before


def test_the_class_s_own_forward_is_no_change():
    """accelerate stores it on a model where it takes its wrapper off; another function is a change."""
    model = tiny_model("qwen3")
    before = function_of(model)
    for method in (type(model).forward, type(model).forward.__wrapped__):
        model.forward = MethodType(method, model)
        assert function_of(model) == before
    model.forward = MethodType(lambda self, *args, **kwargs: type(self).forward(self, *args, **kwargs), model)
    assert function_of(model) != before


def test_rows_are_of_the_runs_prompts_and_lengths(tmp_path):
    trainer = embedded(tmp_path, max_completion_length=12)
    trainer.train()
    rows, tokenizer = trainer.vllm_generation.engine.checked_rows, trainer.processing_class
    prompts = [tokenizer(prompt)["input_ids"] for prompt in dataset()["prompt"]]
    longest = max(map(len, prompts)) + 12
    assert {len(row) for row in rows} == {longest} and 300 < longest * len(rows) <= 480
    for ids in prompts:
        assert any(row[: len(ids)] == ids for row in rows)
    assert len({tuple(row) for row in rows}) == len(rows)


def test_own_rows():
    assert own_rows([[1, 2], [3], [1, 2]], length=2, tokens=6) == [[1, 2], [3, 1], [2, 3]]
    assert own_rows([[1, 2, 3]], length=2, tokens=2) == [[1, 2]]
    assert own_rows([[7]], length=3, tokens=90) == [[7, 7, 7]]


def words_tokenizer(count: int) -> PreTrainedTokenizerFast:
    """A tokenizer of a task's own words, to which every other text is unknown."""
    names = ["<unk>", "<pad>", "<eos>", *(f"w{number}" for number in range(count))]
    backend = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **special)


@pytest.mark.vllm
@pytest.mark.parametrize("precision", rest_is_long(["int8", "bf16"]))
def test_a_vocabulary_of_words(tmp_path, precision):
    """Texts become one repeated token there. A sound run passes on its own prompts, and a broken engine does not."""
    engines = pytest.importorskip("vllm_engines")
    tokenizer, path = words_tokenizer(200), tmp_path / "policy"
    tiny_model("qwen3", seed=3, dtype=torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    assert {token for row in check_sequences(tokenizer, 160) for token in row} == {0}
    prompts = [" ".join(f"w{(7 * n + k * k) % 200}" for k in range(4 + n)) for n in range(8)]
    args = config(
        QuantGRPOConfig,
        tmp_path / "run",
        **{"rollout_precision": precision, "use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 256},
        **{"vllm_engine_kwargs": engines.SMALL, "sync_check_steps": 1, "max_steps": 2, "bf16": True},
    )
    data = Dataset.from_dict({"prompt": prompts})
    trainer = make(QuantGRPOTrainer, args, model=str(path), train_dataset=data, processing_class=tokenizer)
    trainer.train()
    rows = trainer.vllm_generation.engine.checked_rows
    assert len({token for row in rows for token in row}) > 30 and {len(row) for row in rows} == {11 + 8}
    found = trainer.check_sync()
    assert found["sync_check/logp_difference"] < 0.75 * found["sync_check/bound"]
    trainer.model.model.layers[0].register_forward_hook(lambda module, args, output: output * 3)
    with pytest.raises(RuntimeError, match=r"of another function: the policy's `model.layers.0` has changed"):
        trainer.check_sync()
