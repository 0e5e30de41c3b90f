"""Models and adapters that users bring, in vLLM: it samples from them, or one clear error says why not."""

import peft
import pytest
import torch
from drawing import generated
from long_tests import rest_is_long
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from readers import load_reader, save_reader
from tiny import FAMILIES, save_tiny, tiny_tokenizer
from training import lora, trainer_for
from transformers import AutoModelForCausalLM


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm_engines import SMALL, engine, fp8_block_anywhere, fresh, greedy, keep, policy, update

from trl_quant import QuantGRPOTrainer
from trl_quant.rollout import VLLMEngine
from trl_quant.rollout.vllm import kernel_checks
from trl_quant.rollout.vllm.support import vllm_version


pytestmark = pytest.mark.vllm


def adapted(path, adapter: peft.PeftConfig, **options) -> peft.PeftModel:
    torch.manual_seed(1)
    model = get_peft_model(policy(path, dtype=torch.float32, **options), adapter)
    update(model, seed=0, size=0.1)
    return model


def assert_samples_from(model, precision: str, path, **options) -> VLLMEngine:
    """
    After syncs an engine has the bits of one that starts on the weights that PEFT merges, and passes the check. Returns
    the engine.
    """
    sampler = engine(model, precision, **options)
    for seed in (1, 2):
        update(model, seed, size=0.05)
        sampler.sync()
        metrics = sampler.check_sync()
        assert metrics["sync_check/logp_difference"] < metrics["sync_check/bound"]
        assert sampler.differing_weight() is None
    assert greedy(sampler.llm) == greedy(fresh(model, precision, path / "fresh"))
    return sampler


def refused(call, *words) -> None:
    with pytest.raises(ValueError) as error:
        call()
    assert not [word for word in words if word not in str(error.value)], str(error.value)


# Adapters


@pytest.mark.parametrize("family", rest_is_long([name for name in FAMILIES if name != "gemma2"], "qwen2"))
def test_a_head_that_is_trained_whole(tmp_path, family):
    adapter = LoraConfig(r=4, target_modules="all-linear", modules_to_save=["lm_head"])
    assert_samples_from(adapted(tmp_path / "model", adapter, family=family, tied=False), "int8", tmp_path)


ADAPTERS = {
    "head and embeddings": LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"]),
    "LoRA on the embeddings": LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"]),
    "tokens": LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[5, 6, 7]),
    "AdaLoRA": peft.AdaLoraConfig(init_r=6, total_step=9, target_modules=["q_proj", "down_proj"]),
    "norms": peft.LNTuningConfig(target_modules=["input_layernorm", "norm"]),
    "PiSSA": LoraConfig(r=4, target_modules="all-linear", init_lora_weights="pissa"),
}


@pytest.mark.parametrize("kind", rest_is_long(ADAPTERS, "AdaLoRA", "tokens"))
def test_adapters(tmp_path, kind):
    assert_samples_from(adapted(tmp_path / "model", ADAPTERS[kind], tied=False), "int8", tmp_path)


OF_BIASES = {
    "a bias of LoRA": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_bias=True),
    "IA3": peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
}


@pytest.mark.parametrize("kind", OF_BIASES)
def test_adapters_that_change_biases(tmp_path, kind):
    """The check knows the bias that PEFT merges, and finds the base's in its place."""
    model = adapted(tmp_path / "model", OF_BIASES[kind], family="qwen2", tied=False)
    sampler = assert_samples_from(model, "int8", tmp_path)
    base = model.get_base_model().model.layers[1].self_attn.v_proj.get_base_layer().bias.data

    def hold_the_base(vllm_model):
        held = vllm_model.get_parameter("model.layers.1.self_attn.qkv_proj.bias").data[-len(base) :]
        assert not torch.equal(held, base.to(held))
        held.copy_(base)

    sampler.llm.apply_model(hold_the_base)
    assert sampler.differing_weight() == "model.layers.1.self_attn.q_proj.bias"
    with pytest.raises(RuntimeError, match="corrupted"):
        sampler.check_sync()


def test_one_of_the_layers_that_are_quantized_as_one(tmp_path, monkeypatch):
    """The self-check knows a layer that is trained whole beside the layers that share its scale."""
    fp8_block_anywhere(monkeypatch)
    adapter = LoraConfig(r=4, target_modules=["q_proj", "gate_proj"], modules_to_save=["k_proj", "up_proj"])
    assert_samples_from(adapted(tmp_path / "model", adapter), "fp8_block", tmp_path)


def test_the_second_adapter_beside_the_base(tmp_path):
    model = get_peft_model(policy(tmp_path / "model", dtype=torch.float32), lora())
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    model.set_adapter("other")
    sampler = engine(model, "int8", lora_sync="adapter")
    update(model, seed=1)
    sampler.sync()
    metrics = sampler.check_sync()
    assert metrics["sync_check/logp_difference"] < metrics["sync_check/bound"]


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_an_adapter_that_changed_its_base_is_not_synced_alone(tmp_path, start):
    adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=start)
    model = get_peft_model(policy(tmp_path / "model"), adapter)
    refused(lambda: engine(model, "int8", lora_sync="adapter"), f"`init_lora_weights`='{start}'", "'merge'")


# Models that differ from the checkpoint that vLLM starts from


def trainer_of(path, model, **options) -> QuantGRPOTrainer:
    settings = {"use_vllm": True, "vllm_mode": "colocate", "rollout_precision": "int8", "max_steps": 1}
    settings |= {"vllm_engine_kwargs": SMALL, "vllm_max_model_length": 256, "sync_check_steps": 1}
    return trainer_for(path / "out", model, **settings | options)


def resized(model):
    model.resize_token_embeddings(384)


def with_other_norms(model):
    model.config.rms_norm_eps = 0.5


def with_fewer_layers(model):
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1


def rotated_otherwise(model):
    model.config.rope_parameters = model.config.rope_parameters | {"rope_theta": 100.0}


def untied(model):
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(2 * model.lm_head.weight.detach())


EDITS = {
    resized: "vocab_size (320, not 384)",
    with_other_norms: "rms_norm_eps (1e-06, not 0.5)",
    with_fewer_layers: "num_hidden_layers (2, not 1)",
    rotated_otherwise: "rope_parameters",
    untied: "tie_word_embeddings (True, not False)",
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_model_that_was_edited_in_memory(tmp_path, edit):
    model = policy(tmp_path / "model")
    edit(model)
    words = ["The policy differs from", "on which vLLM starts", EDITS[edit], "vllm_engine_kwargs={'model': ...}"]
    refused(lambda: trainer_of(tmp_path, model), *words)


def test_the_directory_that_the_message_asks_for(tmp_path):
    model = policy(tmp_path / "model", dtype=torch.float32)
    resized(model)
    model.save_pretrained(tmp_path / "saved")

    tiny_tokenizer().save_pretrained(tmp_path / "saved")
    trainer = trainer_of(tmp_path, model, vllm_engine_kwargs=SMALL | {"model": str(tmp_path / "saved")})
    keep(trainer)
    trainer.train()
    # INT8 alone gives 0.02 where AVX2's products saturate; with other weights the engine is off by more than 0.5
    assert trainer.state.log_history[0]["mismatch/kl_k3"] < 5e-2


def test_options_that_change_the_config(tmp_path):
    path = save_tiny(tmp_path / "model")
    refused(
        lambda: trainer_of(tmp_path, path, model_init_kwargs={"rms_norm_eps": 0.5}), "rms_norm_eps (1e-06, not 0.5)"
    )


def test_a_model_without_a_directory(tmp_path):
    model = policy(tmp_path / "model")
    for file in (tmp_path / "model").iterdir():
        file.unlink()
    (tmp_path / "model").rmdir()
    refused(lambda: trainer_of(tmp_path, model), "was loaded from", "where vLLM finds no config")
    model.config.name_or_path = ""
    refused(lambda: trainer_of(tmp_path, model), "was built in memory, and vLLM starts from a directory")


def test_biases_that_vllm_lacks(tmp_path):
    """vLLM's Qwen3 loads the biases of q, k and v, and skips that of the output."""
    model = policy(tmp_path / "model", attention_bias=True)
    refused(lambda: engine(model, "bf16"), "no bias in 2 layers", "o_proj", "use_vllm=False")
    assert_samples_from(policy(tmp_path / "llama", family="llama", attention_bias=True), "bf16", tmp_path)


def test_a_server_that_lacks_biases_is_found(tmp_path, monkeypatch):
    """Before anything is trained, also where the biases are too small for the text to show."""
    monkeypatch.setattr(kernel_checks, "check_biases", lambda model, layers: None)  # a server does not call it
    model = policy(tmp_path / "model", attention_bias=True)
    for name, param in model.named_parameters():
        if name.endswith("o_proj.bias"):
            param.data.normal_(std=0.01)
    sampler = engine(model, "int8")
    sampler.sync()
    lacking = "model.layers.0.self_attn.o_proj.bias"
    assert sampler.differing_weight() == lacking
    with pytest.raises(RuntimeError, match=f"the engine holds another `{lacking}` than the policy"):
        sampler.check_sync()


def test_a_head_that_vllm_lacks(tmp_path):
    if vllm_version() < Version("0.31"):
        pytest.skip("Gemma 2 of vLLM 0.27 starts with a tied head alone, and says so itself")
    model = policy(tmp_path / "model", family="gemma2", tied=False)
    refused(lambda: engine(model, "bf16"), "vLLM's model has no head of its own", "use_vllm=False")


def test_a_head_that_was_tied_in_memory(tmp_path):
    model = policy(tmp_path / "model", tied=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    refused(lambda: engine(model, "int8"), "head has the weight of its embeddings", "Set `config.tie_word_embeddings=")


def test_a_tied_head_of_which_a_config_says_otherwise(tmp_path):
    """The message names the fields that let the model sample: transformers reads the outer config, vLLM the inner."""
    model, processor = load_reader(save_reader(tmp_path / "model", "gemma3"))
    outer, inner = model.config, model.config.text_config
    outer.tie_word_embeddings = inner.tie_word_embeddings = False
    fields = [f"`config.{place}tie_word_embeddings=True`" for place in ("", "text_config.")]
    refused(lambda: engine(model, "int8", processor), f"Set {' and '.join(fields)}, save")
    outer.tie_word_embeddings = True
    model.save_pretrained(tmp_path / "model")
    model, _ = load_reader(str(tmp_path / "model"))
    refused(lambda: engine(model, "int8", processor), f"Set {fields[1]}, save")
    model.config.text_config.tie_word_embeddings = True
    model.save_pretrained(tmp_path / "model")
    sampler = engine(load_reader(str(tmp_path / "model"))[0], "int8", processor)
    sampler.sync()
    assert sampler.differing_weight() is None


# Tokens that end a completion


def test_every_end_of_a_completion_ends_it(tmp_path):
    """A completion ends at each end token of the model in memory, though vLLM reads only those on disk."""
    model = AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path / "model", dtype=torch.bfloat16))
    model.generation_config.eos_token_id = list(range(200))
    prompts = [[5, 6, 7]] * 32
    for generation_kwargs, ends in (({}, True), ({"stop_token_ids": [201]}, True), ({"ignore_eos": True}, False)):
        sampler = engine(model, "bf16", generation_kwargs=generation_kwargs)
        sampler.sync()
        _, completions, *_ = generated(sampler, prompts)
        assert all(token >= 200 for ids in completions for token in ids[:-1]) == ends
        assert ({len(ids) for ids in completions} == {8}) != ends
