"""Models, adapters and tokenizers that users bring: an engine samples from them, or one clear error says why not."""

import copy
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
import transformers
from accelerate import Accelerator
from long_tests import rest_is_long
from peft import LoraConfig, get_peft_model
from tiny import EOS, FAMILIES, MIXTURES, PAD, save_tiny, tiny_model, tiny_tokenizer
from training import config, dataset, lora, trainer_for

from trl_quant import QuantGRPOConfig
from trl_quant.config.before_loading import check_before_loading
from trl_quant.rollout.tensors import default_dtype
from trl_quant.rollout.weights import PolicyWeights


trainer_of = partial(trainer_for, rollout_precision="int8", max_steps=2)


def mismatch(trainer) -> float:
    """The largest KL between sampler and policy in a short training."""
    trainer.train()
    return max(log["mismatch/kl_k3"] for log in trainer.state.log_history if "loss" in log)


def refused(call, *words) -> None:
    with pytest.raises(ValueError) as error:
        call()
    assert not [word for word in words if word not in str(error.value)], str(error.value)


# Adapters: engines get the weights that PEFT merges

ADAPTERS = {
    "LoRA on the embeddings": lambda: LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"]),
    "tokens beside LoRA": lambda: LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[3, 65]),
    "tokens": lambda: peft.TrainableTokensConfig(token_indices=[3, 65], target_modules=["embed_tokens"]),
    "DoRA": lambda: LoraConfig(r=4, target_modules="all-linear", use_dora=True),
    "biases": lambda: LoraConfig(r=4, target_modules=["q_proj"], bias="all"),
    "AdaLoRA": lambda: peft.AdaLoraConfig(init_r=6, total_step=9, target_modules=["q_proj", "down_proj"]),
    "norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm", "norm"]),
    "IA3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LoHa": lambda: peft.LoHaConfig(r=4, target_modules=["q_proj", "down_proj"]),
    "LoKr": lambda: peft.LoKrConfig(r=4, target_modules=["q_proj", "down_proj"]),
    "OFT": lambda: peft.OFTConfig(oft_block_size=32, target_modules=["q_proj", "down_proj"]),
    "BOFT": lambda: peft.BOFTConfig(boft_block_size=4, target_modules=["q_proj", "down_proj"]),
    "VeRA": lambda: peft.VeraConfig(r=8, target_modules=["q_proj"]),
    "FourierFT": lambda: peft.FourierFTConfig(n_frequency=50, target_modules=["q_proj"]),
    "PiSSA": lambda: LoraConfig(r=4, target_modules="all-linear", init_lora_weights="pissa"),
    "whole modules": lambda: LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head", "k_proj", "norm"]),
}


def adapted(kind: str, model=None) -> peft.PeftModel:
    """A policy whose adapter acts, as if it had been trained."""
    torch.manual_seed(2)
    model = get_peft_model(model or tiny_model("qwen2", tied=False), ADAPTERS[kind]())
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(torch.randn_like(param), alpha=0.1)
    return model


@pytest.mark.parametrize("kind", ADAPTERS)
def test_engines_get_what_peft_merges(kind):
    """Also while vLLM reloads, when torch's default type is BF16. The policy keeps its bits."""
    model = adapted(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modules = dict(model.named_modules())
    with default_dtype(torch.bfloat16):
        streamed = {name: value.clone() for name, value in PolicyWeights(model, Accelerator(cpu=True))}
    assert {name: id(module) for name, module in model.named_modules()} == {n: id(m) for n, m in modules.items()}
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)

    base = dict(tiny_model("qwen2", tied=False).named_parameters())
    merged = dict(copy.deepcopy(model).merge_and_unload().named_parameters())
    assert streamed.keys() == merged.keys() == base.keys()
    for name, value in merged.items():
        torch.testing.assert_close(streamed[name], value.data, rtol=0, atol=1e-6)
    assert any((streamed[name] - base[name]).abs().max() > 1e-3 for name in base)


@pytest.mark.parametrize("kind", ["tokens beside LoRA", "AdaLoRA", "norms", "LoRA on the embeddings"])
def test_a_training_samples_from_them(tmp_path, kind):
    assert mismatch(trainer_of(tmp_path, adapted(kind))) < 1e-2


def test_tokens_of_a_tied_model_are_refused(tmp_path):
    """PEFT wraps the head of such a model, while TRL multiplies with the head's own weight and bias."""
    model = adapted("tokens beside LoRA", tiny_model("qwen2", tied=True))
    refused(lambda: trainer_of(tmp_path, model), "`trainable_token_indices`", "Untie the model")


@pytest.mark.parametrize("several", [False, True])
def test_a_norm_that_is_trained_whole_is_noised(tmp_path, several):
    """The engine adds noise to the norm of the active adapter, also where another adapter trains that norm too."""
    whole = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["input_layernorm"], init_lora_weights=False)
    model = get_peft_model(tiny_model(), whole)
    if several:
        model.add_adapter("other", whole)
    noise = {"noise_schedule": "exponential", "noise_sigma_start": 0.02, "noise_sigma_end": 0.01, "noise_stages": 3}
    trainer = trainer_of(tmp_path, model, **noise)
    trainer.train()
    last = [log for log in trainer.state.log_history if "loss" in log][-1]
    assert last["noise/norms"] == 4 and last["noise/effective_sigma"] == pytest.approx(last["noise/sigma"], rel=0.2)


# Of a checkpoint, for which PEFT or an engine would refuse them after it is loaded
MISFITS = {
    "tied head": ({"target_modules": ["q_proj"], "trainable_token_indices": [3, 65]}, ["`trainable_token_indices`"]),
    "no bias": ({"target_modules": ["o_proj"], "lora_bias": True}, ["`lora_bias`", "layers.0.self_attn.o_proj"]),
    "no match": ({"target_modules": ["query"]}, ["`peft_config`", "query"]),
    "no layer": ({"target_modules": ["q_proj"], "layers_to_transform": [7]}, ["`peft_config`"]),
}


@pytest.mark.parametrize("name", MISFITS)
def test_adapters_that_do_not_fit_are_refused_before_the_policy_is_loaded(tmp_path, monkeypatch, name):
    settings, words = MISFITS[name]
    loads = lambda *args, **kwargs: pytest.fail("the policy was loaded")  # noqa: E731
    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", loads)
    model = str(written(tmp_path, family="qwen2", tied=True))
    refused(lambda: trainer_of(tmp_path, model, peft_config=LoraConfig(r=4, **settings)), *words)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_that_fits_is_checked_as_a_copy(tmp_path, kind):
    """Also one that starts from the policy's weights, which the check does not have."""
    model, given = str(written(tmp_path, tied=False)), ADAPTERS[kind]()
    args = config(QuantGRPOConfig, tmp_path, rollout_precision="int8")
    before, random = copy.deepcopy(given), torch.get_rng_state()
    check_before_loading(
        model, args, dataset(8), None, given, [lambda completions, **others: [0.0]], quantization_config=None
    )
    assert given == before
    assert torch.equal(torch.get_rng_state(), random)  # the adapter starts as in TRL's trainer


REFUSED_ADAPTERS = [
    (lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), ["PromptTuningConfig", "weights"]),
    (lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), ["PrefixTuningConfig"]),
    (lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), ["PromptEncoderConfig"]),
    (lambda: peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=4, adapter_layers=1), ["AdaptionPrompt"]),
    (lambda: LoraConfig(r=4, layer_replication=[(0, 2), (1, 2)]), ["layer_replication", "config does not describe"]),
]


@pytest.mark.parametrize(("adapter", "words"), REFUSED_ADAPTERS, ids=[words[0] for _, words in REFUSED_ADAPTERS])
def test_adapters_that_are_no_change_of_weights(tmp_path, adapter, words):
    refused(lambda: trainer_of(tmp_path, str(written(tmp_path)), peft_config=adapter()), "`peft_config`", *words)
    if adapter().peft_type == "PREFIX_TUNING":  # PEFT has wrapped this model already
        model = get_peft_model(tiny_model(), adapter())
        refused(lambda: trainer_of(tmp_path, model), "PREFIX_TUNING", "weights")


def test_a_bias_that_the_base_lacks(tmp_path):
    def adapter(name):
        return LoraConfig(r=4, lora_bias=True, target_modules=[name], init_lora_weights=False)

    model = tiny_model("qwen2")
    refused(lambda: trainer_of(tmp_path, model, peft_config=adapter("o_proj")), "`lora_bias`", "layers.0.self_attn.o_p")
    assert mismatch(trainer_of(tmp_path, tiny_model("qwen2"), peft_config=adapter("q_proj"))) < 1e-2


# The model


def written(path: Path, remove: tuple[str, ...] = (), **options) -> Path:
    save_tiny(path / "model", **options)
    for pattern in remove:
        for file in (path / "model").glob(pattern):
            file.unlink()
    return path / "model"


def classifier() -> transformers.PreTrainedModel:
    return transformers.Qwen3ForSequenceClassification(tiny_model().config)


def saved_classifier(path: Path) -> str:
    classifier().save_pretrained(path / "classifier")
    return str(path / "classifier")


def adapter_alone(path: Path) -> str:
    get_peft_model(tiny_model(), lora()).save_pretrained(path / "adapter")
    return str(path / "adapter")


REFUSED_MODELS = {
    "a typo": (lambda path: str(path / "mdoel"), ["mdoel", "is neither a directory here"]),
    "a name of the hub, offline": (
        lambda path: "nobody/has-this",
        ["'nobody/has-this'", "is neither a directory here"],
    ),
    "an empty directory": (lambda path: str(path), ["is a directory without a config.json"]),
    "no config": (lambda path: str(written(path, ("config.json",))), ["is a directory without a config.json"]),
    "an adapter": (adapter_alone, ["is an adapter without its base", "AutoPeftModelForCausalLM", "is_trainable=True"]),
    "a classifier": (lambda path: classifier(), ["Qwen3ForSequenceClassification", "generates no text"]),
    "a classifier's directory": (saved_classifier, ["Qwen3ForSequenceClassification", "generates no text"]),
    "a model without a head": (lambda path: tiny_model().model, ["Qwen3Model", "generates no text"]),
    "an encoder": (
        lambda path: transformers.BertForMaskedLM(transformers.BertConfig(hidden_size=48, vocab_size=320)),
        ["BertForMaskedLM", "generates no text"],
    ),
    "a config": (lambda path: tiny_model().config, ["`model`=Qwen3Config(...) must be a name"]),
    "a path": (lambda path: written(path), ["`model`=PosixPath(", "as a string"]),
    "DataParallel": (lambda path: torch.nn.DataParallel(tiny_model()), ["`model`=DataParallel(...) must be a name"]),
    "float64": (lambda path: tiny_model(dtype=torch.float64), ["`model.embed_tokens.weight` is in float64"]),
    "fewer layers than the config's": (lambda path: edited("layers"), ["has no `model.layers.1.", "config"]),
    "a bias that the config lacks": (lambda path: edited("bias"), ["has `model.layers.0.self_attn.q_proj.bias`"]),
    "a parameter of its own": (lambda path: edited("own"), ["has `counter`, which its config does not describe"]),
    "other sizes": (lambda path: edited("sizes"), ["`model.layers.0.mlp.up_proj.weight` has the shape (64, 128)"]),
}


def edited(how: str) -> transformers.PreTrainedModel:
    model = tiny_model()
    first = model.model.layers[0]
    if how == "layers":
        model.model.layers = model.model.layers[:1]
    elif how == "bias":
        first.self_attn.q_proj.bias = torch.nn.Parameter(torch.ones(128))
    elif how == "own":
        model.counter = torch.nn.Parameter(torch.ones(3))
    else:
        first.mlp.up_proj.weight = torch.nn.Parameter(first.mlp.up_proj.weight[:64].detach())
    return model


@pytest.mark.parametrize("case", REFUSED_MODELS)
def test_what_is_no_policy_is_refused(tmp_path, case):
    model, words = REFUSED_MODELS[case]
    refused(lambda: trainer_of(tmp_path / "out", model(tmp_path)), *words)


def resized(size: int, tied: bool = True):
    model = tiny_model(tied=tied)
    model.resize_token_embeddings(size)
    return model


def with_config(**changes):
    model = tiny_model(seed=3)
    model.config.update(changes)
    return model


def tied_in_memory():
    model = tiny_model(tied=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


SAMPLED_MODELS = {
    "larger vocabulary": lambda: resized(384),
    "smaller vocabulary, untied": lambda: resized(300, tied=False),
    "odd vocabulary": lambda: resized(331),
    "tied in memory": tied_in_memory,
    "compiled": lambda: torch.compile(tiny_model()),
    "layers compiled": lambda: compiled_layers(tiny_model()),
    "odd sizes": lambda: tiny_model(hidden_size=120, intermediate_size=250, head_dim=32),
    "bfloat16": lambda: tiny_model(dtype=torch.bfloat16),
}


def compiled_layers(model):
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer)
    return model


@pytest.mark.parametrize("case", SAMPLED_MODELS)
def test_what_is_sampled_from(tmp_path, case):
    with torch._dynamo.config.patch(disable=True):
        assert mismatch(trainer_of(tmp_path, SAMPLED_MODELS[case]())) < 1e-2


@pytest.mark.parametrize("family", rest_is_long(FAMILIES, "gemma3", "phi3"))
def test_every_family_with_its_head_trained_whole(tmp_path, family):
    whole = LoraConfig(r=4, target_modules="all-linear", modules_to_save=["lm_head"], init_lora_weights=False)
    assert mismatch(trainer_of(tmp_path, tiny_model(family, tied=False), peft_config=whole)) < 1e-2


@pytest.mark.parametrize("family", MIXTURES)
def test_mixtures_of_experts_are_refused_by_name(tmp_path, family):
    model = tiny_model(family)
    for precision in ("int8", "nvfp4", "int4"):
        settings = {"rollout_precision": None, "train_precision": precision}
        settings |= {"peft_config": lora()} if precision == "nvfp4" else {}
        refused(partial(trainer_of, tmp_path, model, **settings), "the policy is a mixture of 4 experts")
    trainer = trainer_of(tmp_path, model, rollout_precision=None, max_steps=1)
    trainer.train()  # TRL's own sampling, quantized nowhere, takes it
    assert trainer.state.global_step == 1


WEIGHTS = ["model.layers.1.input_layernorm.weight", "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"]


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_that_is_not_finite_is_the_policys_fault(tmp_path, name, value):
    model = tiny_model()
    with torch.no_grad():
        model.get_parameter(name).view(-1)[7] = value
    refused(lambda: trainer_of(tmp_path, model), f"`{name}` holds NaN or infinity", "The policy itself is broken")
    model.save_pretrained(tmp_path / "saved")
    refused(lambda: trainer_of(tmp_path, str(tmp_path / "saved")), f"`{name}` holds NaN or infinity")
    with torch.no_grad():
        model.get_parameter(name).view(-1)[7] = 0.0
    trainer_of(tmp_path, model)


def test_an_adapter_that_is_not_finite(tmp_path):
    model = get_peft_model(tiny_model(), lora())
    with torch.no_grad():
        model.get_parameter("base_model.model.model.layers.1.mlp.up_proj.lora_B.default.weight")[0, 0] = float("nan")
    refused(lambda: trainer_of(tmp_path, model), "`model.layers.1.mlp.up_proj.lora_B.default.weight` holds NaN")


def test_adapters_that_are_merged_are_not_trained(tmp_path):
    model = get_peft_model(tiny_model(), lora())
    model.merge_adapter()
    trainer = trainer_of(tmp_path, model)
    refused(trainer.train, "merged", "unmerge_adapter()")
    model.unmerge_adapter()
    assert mismatch(trainer) < 1e-2


@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
def test_a_base_of_bitsandbytes(tmp_path, bits):
    """A sync leaves 8-bit layers as they are; bitsandbytes may change the layout of 4-bit layers at an evaluation."""
    pytest.importorskip("bitsandbytes")
    config = transformers.BitsAndBytesConfig(**{bits: True})
    path = written(tmp_path, dtype=torch.bfloat16)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, quantization_config=config, device_map="cpu")
    trainer = trainer_of(tmp_path / "out", model, peft_config=lora())
    assert mismatch(trainer) < 1e-2
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        before = trainer.model.eval()(ids).logits
        weight = trainer.model.get_submodule("base_model.model.model.layers.0.mlp.up_proj.base_layer").weight
        if getattr(getattr(weight, "quant_state", None), "packing_format_for_cpu", False):
            refused(trainer.vllm_generation.sync_weights, "bitsandbytes has repacked the 4-bit base", "8 or 16 bits")
            return
        trainer.vllm_generation.sync_weights()
        assert torch.equal(trainer.model(ids).logits, before)


def test_a_reference_of_a_model_in_memory(tmp_path):
    refused(lambda: trainer_of(tmp_path, tiny_model(), beta=0.1), "`beta`=0.1", "built in memory")
    trainer_of(tmp_path, tiny_model(), beta=0.1, peft_config=lora())


def test_a_prompt_with_a_token_that_the_model_lacks(tmp_path):
    trainer = trainer_of(tmp_path, tiny_model())
    trainer.vllm_generation.sync_weights()
    with pytest.raises(ValueError, match="the token 320, but the model embeds only 320"):
        trainer.vllm_generation.generate([[5, 6], [5, 320]], None, 1)
    trainer.vllm_generation.generate([[5, 6], [5, 319]], None, 1)


@pytest.mark.parametrize("how", ["frozen", "merged and unloaded", "disabled"])
def test_nothing_to_train(tmp_path, how):
    model = tiny_model().requires_grad_(False)
    if how == "merged and unloaded":
        model = get_peft_model(tiny_model(), lora()).merge_and_unload()
    if how == "disabled":
        model = get_peft_model(tiny_model(), lora())
        model.base_model.disable_adapter_layers()
    trainer = trainer_of(tmp_path, model)  # may evaluate the model
    refused(trainer.train, "No parameter of the policy requires a gradient", "merge_and_unload")


# The tokenizer


def tokenizer(**changes):
    made = tiny_tokenizer()
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def grown(**special):
    made = tiny_tokenizer()
    made.add_special_tokens(special)
    return made


REFUSED_TOKENIZERS = [
    (lambda: tokenizer(eos_token=None, pad_token=None), ["neither a padding token nor an EOS", "tokenizer.pad_token"]),
    (lambda: grown(pad_token="[PAD]"), ["`pad_token` '[PAD]' has the id 320", "320 tokens", "resize_token_embeddings"]),
    (lambda: grown(eos_token="[END]"), ["`eos_token` '[END]' has the id 320", "resize_token_embeddings"]),
]


@pytest.mark.parametrize(("made", "words"), REFUSED_TOKENIZERS, ids=[words[0] for _, words in REFUSED_TOKENIZERS])
def test_a_tokenizer_that_does_not_fit(tmp_path, made, words):
    """Refused before the model, which has no weights here, is loaded, or before an engine is built."""
    model = str(written(tmp_path, ("*.safetensors",)))
    refused(lambda: trainer_of(tmp_path, model, processing_class=made()), *words)
    made().save_pretrained(written(tmp_path))
    if "neither" not in words[0]:
        refused(lambda: trainer_of(tmp_path, model, processing_class=None), *words)


def test_what_is_no_tokenizer(tmp_path):
    model = str(written(tmp_path, ("*.safetensors",)))
    refused(lambda: trainer_of(tmp_path, model, processing_class=model), "`processing_class` is a str", "AutoTokenizer")


def test_a_directory_without_a_tokenizer(tmp_path):
    model = str(written(tmp_path, ("tok*",)))
    refused(lambda: trainer_of(tmp_path, model, processing_class=None), "has no tokens but", "processing_class")


def test_conversations_without_a_chat_template(tmp_path):
    conversations = dataset().map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    model = str(written(tmp_path, ("*.safetensors",)))
    given = {"processing_class": tokenizer(chat_template=None)}
    refused(lambda: trainer_of(tmp_path, model, train_dataset=conversations, **given), "no chat template")
    given["processing_class"].save_pretrained(model)
    Path(model, "chat_template.jinja").unlink(missing_ok=True)
    refused(lambda: trainer_of(tmp_path, model, train_dataset=conversations, processing_class=None), "no chat template")
    assert mismatch(trainer_of(tmp_path, tiny_model(), **given)) < 1e-2


def lengths(trainer) -> list[int]:
    trainer.vllm_generation.sync_weights()
    torch.manual_seed(0)
    _, completions, *_ = trainer.vllm_generation.generate([[5, 6, 7]] * 64, None, 1)
    return [len(ids) for ids in completions]


def test_every_end_of_a_completion_ends_it(tmp_path):
    """A completion ends at each end token of the model in memory; without any it has full length."""
    model = tiny_model()
    model.generation_config.eos_token_id = list(range(200))
    some = lengths(trainer_of(tmp_path, model))
    assert min(some) == 1 and sum(some) / len(some) < 3
    model.generation_config.eos_token_id = None
    assert set(lengths(trainer_of(tmp_path, model, processing_class=tokenizer(eos_token=None)))) == {8}


@pytest.mark.parametrize("changes", [{"eos_token": None}, {"pad_token": None}, {"pad_token": EOS}, {"eos_token": PAD}])
def test_other_tokenizers_train(tmp_path, changes):
    assert mismatch(trainer_of(tmp_path, tiny_model(), processing_class=tokenizer(**changes))) < 1e-2


def test_nothing_is_asked_of_trls_own_runs(tmp_path):
    """Without a `rollout_precision` no engine restricts the model."""
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    given = dict.fromkeys(("environment_factory", "rollout_func", "quantization_config"))
    args = config(QuantGRPOConfig, tmp_path)
    given |= {"train_dataset": dataset(), "eval_dataset": None, "reward_funcs": lambda completions, **kwargs: []}
    check_before_loading(model=classifier(), args=args, peft_config=prompts, processing_class=grown(), **given)
