"""
THE table of precisions in which a policy can be sampled or trained, from the nearest to BF16 to the farthest.

A precision is a number format (`trl_quant.formats`) together with the way an engine computes in it. Everything that
needs to know the precisions reads this table: the config's choices and help, the engines, the command line, and the
table in docs/precisions.md, which `python -m trl_quant.precisions` prints. The entries are ordered by the error in a
linear layer's output.
"""

from dataclasses import dataclass, field

from .formats import FORMATS


FP8_GPU = {"capability": (8, 9), "needs": "FP8 matrix multiplication"}
MARLIN_GPU = {"capability": (8, 0), "needs": "Marlin's 4-bit kernels"}
WEIGHT_ONLY_KERNELS = ("Marlin", "Humming", "Emulation")


@dataclass(frozen=True)
class InVLLM:
    """
    How vLLM runs a precision.

    Attributes:
        methods (`tuple[str, ...]`): Classes of vLLM. One of them must run each linear layer of the decoder.
        capability (`tuple[int, int]`): Lowest CUDA compute capability on which it runs.
        needs (`str`): The feature that requires this capability, for messages.
        below (`tuple[int, int]` or `None`): First compute capability for which vLLM no longer has a kernel.
        cpu (`bool`): Whether vLLM runs it on a CPU.
        amx (`bool`): Whether that CPU must have AMX.
        inputs (`dict[str, str]`): Device type -> format of a layer's inputs there. On other devices they stay BF16.
        online (`str` or `None`):
            vLLM's name for quantizing BF16 weights as it loads them. If there is none, the engine starts from weights
            in the layout of the format's `scheme`, and every sync sends such weights.
        fused_scale (`bool`): Whether layers that vLLM fuses (q, k, v; gate, up) are quantized as one matrix.
        kernels (`tuple[str, ...]`):
            Prefixes of the names of the kernels that compute the precision; empty if all kernels do.
        wrong_kernels (`tuple[str, ...]`): Prefixes of the names of kernels that compute something else.
        experts (`str` or `None`):
            The class of vLLM that runs a mixture's experts in this precision on a GPU; `None` if none computes it.
        experts_from (`str`): The first version of vLLM in which it does, if that is above the oldest allowed one.
        for_experts (`dict[str, str]`): vLLM's arguments for a mixture of experts, where a run gives no others.
        as_given (`dict[str, str]`):
            Environment variables that make vLLM multiply with the codes and scales that it is given. On Hopper it would
            otherwise requantize block-scaled weights for DeepGEMM, with scales that are powers of two.
    """

    methods: tuple[str, ...]
    capability: tuple[int, int]
    needs: str
    below: tuple[int, int] | None = None
    cpu: bool = False
    amx: bool = False
    inputs: dict[str, str] = field(default_factory=dict)
    online: str | None = None
    fused_scale: bool = False
    kernels: tuple[str, ...] = ()
    wrong_kernels: tuple[str, ...] = ()
    experts: str | None = None
    experts_from: str = "0"
    for_experts: dict[str, str] = field(default_factory=dict)
    as_given: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Precision:
    """
    One precision. The embedded engine runs every precision on any device.

    Attributes:
        summary (`str`): How many values share a scale, for the table in the docs.
        format (`str` or `None`): Key of `FORMATS`; `None` where nothing is quantized.
        vllm ([`InVLLM`] or `None`): How vLLM runs it; `None` if it does not.
        frozen_base (`bool`): Whether `train_precision` can freeze a policy's base in it, under a LoRA adapter.
        unified (`bool`): Whether `train_precision` can train a policy with the products that an engine samples with.
        trains_experts (`bool`): Whether those are the products of a mixture's experts, too.
        qat (`bool`):
            Whether `train_precision` can train all weights of a policy in it, without an adapter: the inputs stay in 16
            bits, and the weights are quantized in each forward pass (quantization-aware training).
        exact (`bool`):
            Whether a token's outputs in vLLM on Hopper have the same bits whatever other tokens are in the batch. They
            do not in `fp8`, whose kernel for up to 64 tokens sums in another order than the one for more, nor in BF16
            with cuBLAS.
        mismatch (`float` or `None`):
            KL of the sampler from the policy (k3) in nats per token, measured by `benchmarks/mismatch.py`.
    """

    summary: str
    format: str | None = None
    vllm: InVLLM | None = None
    frozen_base: bool = False
    unified: bool = False
    trains_experts: bool = False
    qat: bool = False
    exact: bool = False
    mismatch: float | None = None

    @property
    def travels_quantized(self) -> bool:
        """Whether a sync sends codes and scales to a vLLM engine of this precision, not BF16 weights."""
        return self.format is not None and self.vllm is not None and self.vllm.online is None


PRECISIONS: dict[str, Precision] = {
    "bf16": Precision(
        "BF16, nothing quantized",
        vllm=InVLLM(
            ("UnquantizedLinearMethod",),
            capability=(8, 0),
            needs="BF16 arithmetic",
            cpu=True,
            experts="UnquantizedFusedMoEMethod",
        ),
        mismatch=4.5e-7,
    ),
    "int8": Precision(
        "weights per channel, inputs per token",
        format="int8",
        vllm=InVLLM(
            ("CompressedTensorsW8A8Int8",),
            capability=(8, 0),
            needs="INT8 matrix multiplication and BF16 arithmetic",
            below=(10, 0),
            cpu=True,
            inputs={"cuda": "int8", "cpu": "int8"},
            experts="CompressedTensorsW8A8Int8MoEMethod",
            experts_from="0.28",  # before, their inputs stay in BF16
        ),
        unified=True,
        exact=True,
        mismatch=4.7e-5,
    ),
    "fp8_block": Precision(
        "weights per 128 x 128 block, inputs per 128 of a token",
        format="fp8_block",
        vllm=InVLLM(
            ("Fp8PerBlockOnlineLinearMethod", "CompressedTensorsW8A8Fp8"),
            **FP8_GPU,
            cpu=True,
            amx=True,
            inputs={"cuda": "fp8_block"},
            online="fp8_per_block",
            fused_scale=True,
            wrong_kernels=("Marlin",),
            experts="CompressedTensorsW8A8Fp8MoEMethod",
            as_given={"VLLM_USE_DEEP_GEMM_E8M0": "0"},
        ),
        unified=True,
        exact=True,
        mismatch=3.6e-4,
    ),
    "fp8": Precision(
        "weights per channel, inputs per token",
        format="fp8",
        vllm=InVLLM(
            ("Fp8PtpcOnlineLinearMethod", "CompressedTensorsW8A8Fp8"),
            **FP8_GPU,
            inputs={"cuda": "fp8"},
            online="fp8_per_channel",
            wrong_kernels=("Marlin",),
            experts="CompressedTensorsW8A8Fp8MoEMethod",
            for_experts={"moe_backend": "triton"},  # vLLM takes CUTLASS's kernels, which are slower on an H200
        ),
        unified=True,
        trains_experts=True,
        mismatch=4.5e-4,
    ),
    "fp8_tensor": Precision(
        "weights and inputs per tensor (inputs per token in vLLM)",
        format="fp8_tensor",
        vllm=InVLLM(
            ("Fp8PerTensorOnlineLinearMethod", "CompressedTensorsW8A8Fp8"),
            **FP8_GPU,
            inputs={"cuda": "fp8"},
            online="fp8_per_tensor",
            fused_scale=True,
            wrong_kernels=("Marlin",),
        ),
        mismatch=4.6e-4,
    ),
    "nf4": Precision("weights per 64 values, inputs in BF16", format="nf4", frozen_base=True, mismatch=9.9e-4),
    "nvfp4": Precision(
        "weights per 16 inputs and per tensor, inputs in BF16",
        format="nvfp4",
        vllm=InVLLM(
            ("CompressedTensorsW4A4Fp4",),
            **MARLIN_GPU,
            fused_scale=True,
            kernels=WEIGHT_ONLY_KERNELS,
            experts="CompressedTensorsW4A4Nvfp4MoEMethod",
        ),
        frozen_base=True,
        qat=True,
        mismatch=1.2e-3,
    ),
    "int4": Precision("weights per 128 inputs, inputs in BF16", format="int4", qat=True, mismatch=2.4e-3),
    "mxfp4": Precision(
        "weights per 32 inputs, inputs in BF16",
        format="mxfp4",
        vllm=InVLLM(
            ("CompressedTensorsW4A4Mxfp4",),
            **MARLIN_GPU,
            kernels=WEIGHT_ONLY_KERNELS,
            experts="CompressedTensorsW4A4Mxfp4MoEMethod",
        ),
        frozen_base=True,
        qat=True,
        mismatch=2.0e-3,
    ),
}


def in_vllm() -> dict[str, InVLLM]:
    """Returns precision -> how vLLM runs it, for the precisions that vLLM has, in the order of the table."""
    return {name: precision.vllm for name, precision in PRECISIONS.items() if precision.vllm is not None}


def with_experts() -> list[str]:
    """Returns the precisions in which vLLM runs a mixture's experts on a GPU."""
    return [name for name, vllm in in_vllm().items() if vllm.experts is not None]


def train_precisions() -> list[str]:
    """Returns the precisions that `train_precision` allows."""
    return list(dict.fromkeys([*frozen_bases(), *unified_flows(), *qat_precisions()]))


def frozen_bases() -> list[str]:
    """Returns the precisions in which a policy's base can be frozen under LoRA."""
    return [name for name, precision in PRECISIONS.items() if precision.frozen_base]


def bitsandbytes_bases() -> list[str]:
    """Returns those of [`frozen_bases`] that bitsandbytes holds; our own layers hold the others."""
    return [name for name in frozen_bases() if FORMATS[PRECISIONS[name].format].bitsandbytes]


def four_bits() -> list[str]:
    """Returns the precisions whose weights have 4 bits each."""
    formats = {name: FORMATS[precision.format] for name, precision in PRECISIONS.items() if precision.format}
    return [name for name, format in formats.items() if format.nibbles]


def with_products() -> list[str]:
    """Returns the precisions whose codes are multiplied: those that quantize a layer's inputs too."""
    formats = {name: FORMATS[precision.format] for name, precision in PRECISIONS.items() if precision.format}
    return [name for name, format in formats.items() if format.activations is not None]


def unified_flows() -> list[str]:
    """Returns the precisions whose products a policy can be trained in, on weights of 16 or 32 bits."""
    return [name for name, precision in PRECISIONS.items() if precision.unified]


def experts_flows() -> list[str]:
    """Returns those of [`unified_flows`] in which a mixture's experts can be trained."""
    return [name for name in unified_flows() if PRECISIONS[name].trains_experts]


def qat_precisions() -> list[str]:
    """Returns the 4-bit precisions in which all weights of a policy can be trained."""
    return [name for name, precision in PRECISIONS.items() if precision.qat]


def exact_flows() -> list[str]:
    """Returns the precisions in which trainer and vLLM can get the same bits (`exact_rollouts`)."""
    return [name for name in unified_flows() if PRECISIONS[name].exact]


def markdown() -> str:
    """Returns the table of docs/precisions.md."""
    lines = [
        "| precision | what has a scale | bits | vLLM on a GPU of capability | vLLM on a CPU | KL |",
        "|---|---|---|---|---|---|",
    ]
    for name, precision in PRECISIONS.items():
        bits = 16 if precision.format is None else FORMATS[precision.format].bits
        gpu = cpu = "no"
        vllm = precision.vllm
        if vllm is not None:
            gpu = f"{vllm.capability[0]}.{vllm.capability[1]}"
            gpu += f" to below {vllm.below[0]}.{vllm.below[1]}" if vllm.below else " or newer"
            if vllm.cpu:
                cpu = "with AMX" if vllm.amx else "yes"
        mismatch = "" if precision.mismatch is None else f"{precision.mismatch:.1e}".replace("e-0", "e-")
        cells = (f"`{name}`", precision.summary, f"{bits:g}", gpu, cpu, mismatch)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
