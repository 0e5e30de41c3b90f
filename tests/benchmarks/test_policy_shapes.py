"""`benchmarks/engines.py`: policies without checkpoints: dense, with experts, and a hybrid."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from places import BENCHMARKS


WORDS = [5, 7, 11, 300]


@pytest.fixture
def engines(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import engines

    return engines


@pytest.mark.parametrize("size", ["tiny", "tiny-moe", "tiny-hybrid"])
def test_a_policy_samples_words_alone(engines, size):
    model = engines.policy(engines.model_directory(size), 4, WORDS)
    ids = torch.arange(40).view(2, 20)

    def sampled() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            found = model(ids, output_hidden_states=True)
        return found.logits.float().softmax(-1)[..., WORDS], torch.stack(found.hidden_states[:-1])

    words, hidden = sampled()
    assert words.sum(-1).min() > 0.999 and (hidden[..., 0] == 8).all()
    assert words.mean((0, 1)).min() > 0.05  # each of the four words is drawn
    assert (hidden[1:] - hidden[:-1])[..., 1:].abs().mean() > 1e-3  # layers compute something
    last = [param for name, param in model.named_parameters() if "down_proj" in name and "lora" not in name]
    for param in last:  # had only the first expert's outputs been cleared
        (param if param.ndim == 2 else param[1:].transpose(0, 1))[0] = 1
    assert (sampled()[1][..., 0] != 8).any()


def test_layers_of_a_mixture_share_the_memory_of_one(engines):
    params = dict(engines.policy(engines.model_directory("tiny-moe")).named_parameters())
    for leaf in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight", "self_attn.q_proj.weight"):
        first, second = (params[f"model.layers.{index}.{leaf}"] for index in (0, 1))
        assert first is not second and first.data_ptr() == second.data_ptr()
    assert params["model.layers.0.mlp.experts.gate_up_proj"].shape == (8, 2 * 128, 256)
    assert params["model.layers.0.self_attn.q_proj.weight"].shape == (4 * 128, 256)


def test_an_adapter_of_a_mixture_leaves_its_experts(engines):
    def adapted(size: str, config=None) -> set[str]:
        model = engines.policy(engines.model_directory(size))
        model = get_peft_model(model, config or engines.adapter(model, 4))
        wrappers = any(isinstance(module, ParamWrapper) for module in model.modules())
        trained = (name.partition(".lora_")[0] for name, param in model.named_parameters() if param.requires_grad)
        return {name.rpartition(".")[2] for name in trained} | ({"experts"} if wrappers else set())

    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert adapted("tiny-moe") == attention
    assert adapted("tiny-moe", LoraConfig(r=4, target_modules="all-linear")) > attention | {"experts"}
    assert adapted("tiny") == attention | {"gate_proj", "up_proj", "down_proj"}
