"""Does the noise act in a vLLM engine? The change that it makes to log-probabilities, against the policy's own.

Rounding in BF16 moves each token's log-probability by more than weak noise does, but independently of it: over many
tokens the slope of the engine's change on the change of an exact forward is 1 where the noise arrives, and 0 where the
norms' type swallows it. The exact forward has the rounded weights: in 4 bits, those answer noise otherwise than the
policy's do (a slope of 0.5 to 0.7 on the policy's change, without any engine).
"""

import copy
from collections.abc import Iterator, Sequence

import torch
from vllm import SamplingParams
from vllm_engines import engine, policy

from trl_quant.formats import FORMATS, quantize
from trl_quant.noise import noised_norms, norm_noise
from trl_quant.rollout import RolloutNoise


SIGMAS = (1e-2, 1e-3, 5e-4)
SEED, STEP = 3, 7


def prompts(count: int = 48, length: int = 120) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, 250, (count, length), generator=generator).tolist()


def engine_logps(llm, sequences: list[list[int]]) -> torch.Tensor:
    llm.reset_prefix_cache()
    scoring = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in sequences], scoring, use_tqdm=False)
    return torch.tensor(
        [
            step[token].logprob
            for output, ids in zip(outputs, sequences, strict=True)
            for token, step in zip(ids[1:], output.prompt_logprobs[1:], strict=True)
        ]
    )


@torch.no_grad()
def exact_logps(model, sequences: list[list[int]]) -> torch.Tensor:
    tokens = torch.tensor(sequences, device=model.device)
    logps = model(tokens, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    return logps.gather(-1, tokens[:, 1:, None]).flatten().cpu()


def sampler_of(tmp_path, precision: str, wide_norms: bool, device: str, **model_settings):
    model = policy(tmp_path / f"{precision}-{wide_norms}", **model_settings).to(device)
    sampler = engine(model, precision, wide_norms=wide_norms)
    sampler.sync()
    return sampler


def rounded(model, precision: str):
    """A copy with the decoder's weights as the engine rounds them."""
    model = copy.deepcopy(model)
    for name, module in model.named_modules():
        if precision in FORMATS and isinstance(module, torch.nn.Linear) and name.startswith("model.layers."):
            module.weight.data = quantize(module.weight.data, precision).dequantize()
    return model


def arrivals(sampler, sigmas: Sequence[float]) -> Iterator[tuple[float, float]]:
    """`(effective sigma, slope)` of each strength of noise, one laid after the other."""
    exact = rounded(sampler.model, sampler.precision).float()
    params, sequences = dict(exact.named_parameters()), prompts()
    norms = {name: params[name].data for name in noised_norms(exact.config.model_type, params)}
    sampler.lay_noise(RolloutNoise())
    clean_engine, clean_exact = engine_logps(sampler.llm, sequences), exact_logps(exact, sequences)
    for sigma in sigmas:
        sampler.lay_noise(RolloutNoise(sigma, SEED, STEP))
        for name, norm in norms.items():
            params[name].data = norm_noise(norm, sigma, SEED, STEP, name)
        ours = engine_logps(sampler.llm, sequences) - clean_engine
        theirs = exact_logps(exact, sequences) - clean_exact
        yield sampler.effective_sigma, (ours @ theirs / (theirs @ theirs)).item()


def arrival(tmp_path, precision: str, wide_norms: bool, sigma: float, device: str, sampler=None, **model_settings):
    """`(effective sigma, slope, engine)` of one strength of noise."""
    sampler = sampler or sampler_of(tmp_path, precision, wide_norms, device, **model_settings)
    ((effective, slope),) = arrivals(sampler, (sigma,))
    return effective, slope, sampler
