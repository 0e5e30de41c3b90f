"""`QuantPPOTrainer`: configs and critics that are refused before anything is loaded, and those that are taken."""

import json
import re
import shutil

import pytest
import torch
from datasets import Dataset
from ppo_runs import ppo
from readers import conversation, picture
from safetensors.torch import load_file, save_file
from tiny import save_tiny, save_tiny_vision, tiny_model
from training import config, dataset, make, spread
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from trl import GRPOConfig

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer, QuantPPOConfig, QuantPPOTrainer
from trl_quant.config.before_loading import check_before_loading
from trl_quant.config.checks import check_what
from trl_quant.config.given import Given
from trl_quant.trainers.ppo.critic import load_critic
from trl_quant.trainers.ppo.trainer import ValueStep


pytestmark = pytest.mark.isa


@pytest.mark.parametrize(("name", "says"), [("fp16", "`fp16`"), ("fsdp_version", "FSDP1"), ("deepspeed", "DeepSpeed")])
def test_a_config_refuses_other_ways_to_shard(tmp_path, monkeypatch, name, says):
    if name == "fsdp_version":
        monkeypatch.setattr(QuantPPOConfig, "fsdp_version", 1)
    built = config(QuantPPOConfig, tmp_path, num_generations=1) if name != "fsdp_version" else None
    if name == "fp16":
        built.fp16 = True
    if name == "deepspeed":
        built.deepspeed_plugin = object()
    with pytest.raises(ValueError, match=f"PPO's critic cannot be trained with {says}"):
        config(QuantPPOConfig, tmp_path, num_generations=1) if built is None else check_what("fields", Given(built))


def test_a_schedule_that_knows_one_optimizer_is_refused(tmp_path, policy):
    """Before anything is loaded. An optimizer is the policy's alone, and taken."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1e-3)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    args = config(QuantPPOConfig, tmp_path, num_generations=1)
    with pytest.raises(ValueError, match=r"`optimizers` has a schedule.*`lr_scheduler_type`"):
        make(QuantPPOTrainer, args, model=str(tmp_path / "nowhere"), optimizers=(optimizer, schedule))
    assert make(QuantPPOTrainer, args, model=policy, optimizers=(optimizer, None)).optimizer is optimizer


def test_defaults(tmp_path):
    """One completion a prompt, which GRPO still refuses; TRL's check is back where it was."""
    built = config(QuantPPOConfig, tmp_path, num_generations=1, is_correction="ais", rollout_precision="int8")
    assert (built.num_generations, built.scale_rewards, built.loss_type) == (1, "none", "grpo")
    assert type(built.num_generations) is int
    assert config(QuantPPOConfig, tmp_path, num_generations=4).loss_type == "dapo"
    for kind in (GRPOConfig, QuantGRPOConfig):
        with pytest.raises(ValueError, match="requires at least 2 generations"):
            config(kind, tmp_path, num_generations=1)
    with pytest.raises(ValueError, match=r"`args` is a GRPOConfig\. It must be a `QuantPPOConfig`"):
        QuantPPOConfig.from_trl(config(GRPOConfig, tmp_path))


def test_a_trainer_takes_its_own_config(tmp_path, policy):
    for kind, other in ((QuantPPOTrainer, QuantGRPOConfig), (QuantGRPOTrainer, QuantPPOConfig)):
        with pytest.raises(ValueError, match="PPO has a critic, and GRPO compares"):
            make(kind, config(other, tmp_path), model=policy)


def test_a_critic_that_cannot_be_is_refused_before_anything_is_loaded(tmp_path, policy, monkeypatch):
    monkeypatch.setattr("trl_quant.trainers.sampling.engine_of", None)  # which would load the policy
    fewer = save_tiny(tmp_path / "fewer", vocab_size=300)
    quantized = shutil.copytree(policy, tmp_path / "quantized")
    written = json.loads((quantized / "config.json").read_text())
    written["quantization_config"] = {"quant_method": "fp8"}
    (quantized / "config.json").write_text(json.dumps(written))
    cases = {
        str(tmp_path / "nowhere"): "is neither a directory here",
        fewer: "has 300 tokens, and the policy 320",
        str(quantized): "is quantized, and the critic trains all of its weights",
        save_tiny_vision(tmp_path / "vision"): "`model_type`='blip-2', of which transformers has no token classifier",
    }
    for name, says in cases.items():
        with pytest.raises(ValueError, match=f"{re.escape(repr(name))}.*{says}"):
            ppo(tmp_path, policy, value_model_name_or_path=name)
    with pytest.raises(ValueError, match="built in memory, and the critic starts from a checkpoint"):
        ppo(tmp_path, tiny_model(seed=3))
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):  # a value head needs none
        ppo(tmp_path, tiny_model(seed=3), vf_share_layers=True)
    pictures = dataset(8).add_column("image", [None] * 8)
    inside = Dataset.from_dict({"prompt": [conversation([picture(0)], "look")] * 8})
    named = {
        "`train_dataset`": {"train_dataset": pictures},
        "`eval_dataset`": {"eval_dataset": pictures},
        r"`eval_dataset\['b'\]`": {"eval_dataset": {"a": dataset(8), "b": pictures}},
        "`train_dataset` has images, in a column or a prompt": {"train_dataset": inside},
    }
    for shares in (False, True):
        for name, given in named.items():
            with pytest.raises(ValueError, match=f"{name}.* and the critic reads only text"):
                ppo(tmp_path, policy, given=given, vf_share_layers=shares)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        ppo(tmp_path, policy, given={"eval_dataset": {"a": dataset(8)}})


def test_images_that_come_with_a_generation_are_refused():
    """Of a stream, or of tools."""
    with pytest.raises(ValueError, match="A generation has images, and the critic reads only text"):
        ValueStep(None, None).before_loss({"pixel_values": torch.zeros(1, 3, 2, 2)})
    with pytest.raises(AttributeError, match="'args'"):
        ValueStep(None, None).before_loss({"pixel_values": None})


def test_a_critic_gives_one_value(tmp_path, policy):
    """A reward model of two labels is refused before it is loaded; one of one label and a language model are taken."""
    for kind, labels in ((AutoModelForSequenceClassification, 2), (AutoModelForTokenClassification, 3)):
        name = str(tmp_path / f"labels{labels}")
        kind.from_pretrained(policy, num_labels=labels).save_pretrained(name)
        (tmp_path / f"labels{labels}/model.safetensors").unlink()
        says = f"critic's {name!r} is a Qwen3For.*Classification with {labels} labels, and a critic gives one value"
        with pytest.raises(ValueError, match=f"{says}.*`value_model_name_or_path`"):
            ppo(tmp_path, policy, value_model_name_or_path=name)
    reward = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1)
    reward.score.weight.data.fill_(0.5)
    reward.save_pretrained(tmp_path / "reward")
    score = ppo(tmp_path, policy, value_model_name_or_path=str(tmp_path / "reward")).critic.model.score
    assert (score.weight == 0.5).all() and score.bias == 0
    assert AutoConfig.from_pretrained(policy).num_labels == 2
    assert (ppo(tmp_path, policy).critic.model.score.weight == 0).all()


@pytest.mark.parametrize("other", [False, True])
def test_the_policys_revision_is_that_of_its_own_checkpoint_alone(tmp_path, policy, monkeypatch, other):
    """The check before loading and the loading itself read the critic alike."""
    asked, read = [], AutoConfig.from_pretrained

    def spy(name, **options):
        asked.append((str(name), options.get("revision")))
        return read(name, **options)

    critic = str(shutil.copytree(policy, tmp_path / "critic")) if other else policy
    settings = {"num_generations": 1, "model_init_kwargs": {"revision": "r"}}
    args = config(QuantPPOConfig, tmp_path, value_model_name_or_path=critic if other else None, **settings)
    monkeypatch.setattr(AutoConfig, "from_pretrained", spy)
    check_before_loading(policy, args, dataset(), None, None, reward_funcs=spread)
    assert set(asked) == ({(policy, "r"), (critic, None)} if other else {(policy, "r")})
    asked.clear()
    load_critic(critic, args)
    assert set(asked) == {(critic, None if other else "r")}


def test_a_critic_without_its_layers_is_refused(tmp_path, policy):
    """A checkpoint whose names do not match would be a critic of zeros; one without a head is a language model."""
    other = shutil.copytree(policy, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    args = config(QuantPPOConfig, tmp_path, num_generations=1)
    assert load_critic(str(other), args).model.norm.weight.abs().max() > 0
    renamed = {name.replace("q_proj", "query"): value for name, value in weights.items()}
    save_file(renamed, other / "model.safetensors", {"format": "pt"})
    says = (
        f"{re.escape(repr(str(other)))} lacks 2 weights of a Qwen3ForTokenClassification: .*0.self_attn.q_proj.weight"
    )
    with pytest.raises(ValueError, match=says + ".*`value_model_name_or_path`"):
        load_critic(str(other), args)


def test_a_new_head_has_memory_on_every_rank(tmp_path, policy, monkeypatch):
    """On ranks that read no file, transformers 5.23 leaves it on "meta", where all weights have one address."""
    load = AutoModelForTokenClassification.from_pretrained

    def without_a_head(*args, **given):
        model, loaded = load(*args, **given)
        model.score.to("meta")
        return model, loaded

    monkeypatch.setattr(AutoModelForTokenClassification, "from_pretrained", without_a_head)
    head = load_critic(policy, config(QuantPPOConfig, tmp_path, num_generations=1)).score
    assert all(part.device.type == "cpu" and part.requires_grad and not part.any() for part in head.parameters())
    assert head.weight.data_ptr() != head.bias.data_ptr() and head.weight.data_ptr() != 0


def test_a_policy_that_was_quantized_as_it_was_loaded(tmp_path, policy):
    """Its critic starts from the checkpoint, which is not quantized."""
    model = AutoModelForCausalLM.from_pretrained(policy)
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    args = config(QuantPPOConfig, tmp_path, num_generations=1)
    check_before_loading(model, args, dataset(), None, None, reward_funcs=spread)
    with pytest.raises(ValueError, match="is quantized, and the critic trains all of its weights"):
        model.config.save_pretrained(tmp_path / "quantized")
        args.value_model_name_or_path = str(tmp_path / "quantized")
        check_before_loading(model, args, dataset(), None, None, reward_funcs=spread)


def test_a_critic_without_packed_rows(tmp_path, policy, caplog):
    """Of another family: it computes padding, and says so; with `pack_sequences=True` it is refused."""
    other = save_tiny(tmp_path / "critic", "gemma2")
    trainer = ppo(tmp_path, policy, value_model_name_or_path=other)
    assert trainer.packs and not trainer.critic.packs and "the critic's attention caps logits" in caplog.text
    with pytest.raises(ValueError, match="`pack_sequences`=True cannot act: the critic's attention caps logits"):
        ppo(tmp_path, policy, value_model_name_or_path=other, pack_sequences=True)
