"""
What `trl-quant prepare` writes of mixtures of experts, in plain vLLM on a GPU.

    python3 -m pytest -m gpu -s tests/gpu/test_experts_files_gpu.py

Each checkpoint is loaded by vLLM alone, and its log-probabilities of given texts are compared with those of
transformers' model with the stored weights and rounded inputs. How far they may differ is measured: random errors of
one rounding move codes of inputs and routes of tokens too. A copy of the file in which two experts of each layer are
exchanged must be farther.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import MIXTURES


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm import LLM, SamplingParams
from vllm_engines import MEMORY, PROMPTS, SMALL, keep, mixture

from trl_quant.rollout.verify.rounding import Rounding
from trl_quant.rollout.vllm.support import supported_precisions
from trl_quant.storage.layout import storable
from trl_quant.storage.perplexity import become_quantized
from trl_quant.storage.prepared import PrepareOptions, prepare


pytestmark = [pytest.mark.gpu, pytest.mark.vllm]
STORED = [format for format in storable() if format != "fp8_tensor"]
# Times as far as one rounding. On an H200 1.1 to 1.8 were seen, and exchanged experts are at least 2.7 times as far
FARTHER = 2.2
PREPARE = {"revision": None, "trust_remote_code": False, "awq": False, "calibration": None, "perplexity": None}
PREPARE |= {"calibration_samples": 1, "calibration_length": 2, "perplexity_samples": 0}


def scores(path) -> list[torch.Tensor]:
    """vLLM's log-probabilities of the tokens of each prompt after the first."""
    llm = LLM(model=str(path), max_model_len=512, max_num_seqs=8, gpu_memory_utilization=MEMORY, **SMALL)
    keep(llm)  # engines share what they captured
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=1.0)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], asked, use_tqdm=False)
    return [
        torch.tensor([row[token].logprob for row, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)])
        for output, prompt in zip(outputs, PROMPTS, strict=True)
    ]


@torch.no_grad()
def expected(model) -> list[torch.Tensor]:
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=model.device)
        logps = model(ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        found.append(logps.gather(-1, ids[:, 1:, None]).flatten().cpu())
    return found


def apart(found: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    return (torch.cat(found) - torch.cat(others)).abs().mean().item()


def explained(model, wanted: list[torch.Tensor]) -> float:
    """How far random errors of one rounding, after each product and in the experts' outputs, move what is expected."""
    rounding = Rounding(model.device)
    rounded = [module for module in model.modules() if type(module).__name__.endswith(("Linear", "Experts"))]
    hooks = [module.register_forward_hook(lambda module, args, output: rounding(output)) for module in rounded]
    found = [apart(expected(model), wanted) for _ in range(3)]
    for hook in hooks:
        hook.remove()
    return sum(found) / len(found)


@pytest.mark.parametrize("format", STORED)
@pytest.mark.parametrize("family", MIXTURES)
def test_plain_vllm_computes_with_the_stored_experts(family, format, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM_E8M0", "0")  # with which vLLM changes the stored scales of `fp8_block`
    if missing := supported_precisions().get(format):  # INT4 is vLLM's own affair: no engine of ours samples in it
        pytest.skip(missing)
    model = mixture(tmp_path / "bf16", family)
    path = tmp_path / format
    prepare(PrepareOptions(model=str(tmp_path / "bf16"), format=format, output=str(path), **PREPARE))
    become_quantized(model, path, format)
    right, wanted = scores(path), expected(model)
    bound = FARTHER * explained(model, wanted)
    weights = load_file(path / "model.safetensors")
    swap = {".experts.0.": ".experts.1.", ".experts.1.": ".experts.0."}
    exchanged = {}
    for name, tensor in weights.items():
        found = [part for part in swap if part in name]
        exchanged[name.replace(found[0], swap[found[0]]) if found else name] = tensor
    save_file(exchanged, path / "model.safetensors", metadata={"format": "pt"})
    wrong = scores(path)
    print(family, format, apart(right, wanted), bound, apart(wrong, wanted))
    assert apart(right, wanted) < bound < apart(wrong, wanted)
