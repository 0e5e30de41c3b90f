"""What every rollout engine of ours shares: TRL's generation interface, and the noise.

The engines are TRL's `VLLMGeneration` with another back end, so `GRPOTrainer` drives them as it drives vLLM. A sync
streams clean weights; the noise (AQN) is laid on the engine's norms just before it samples.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from trl.generation.vllm_generation import VLLMGeneration

from ..noise import noised_norms, norm_noise
from .drift import WeightDrift
from .weights import PolicyWeights


@dataclass(frozen=True)
class RolloutNoise:
    """
    Adaptive quantization noise of one generation (QeRL eq. 7-8).

    Parameters:
        sigma (`float`): Standard deviation; 0 means the clean weights.
        seed (`int`): The run's seed.
        step (`int`): The optimizer step that the generation belongs to.
    """

    sigma: float = 0.0
    seed: int = 0
    step: int = 0


class RolloutEngine(VLLMGeneration):
    """
    Base of the rollout engines. It takes the arguments that TRL gives to its `VLLMGeneration`, and:

    Parameters:
        precision (`str`):
            Number format of the copy, a key of [`~precisions.PRECISIONS`].

    Attributes:
        weights ([`~rollout.weights.PolicyWeights`]):
            The policy's weights as they are now.
        noise (`RolloutNoise`):
            Set by the trainer before each generation.
        multimodal_fields (`dict`):
            What the processor made of the prompts' images (`pixel_values` and the like); set by the trainer as well.
        sync_metrics (`dict[str, float]`):
            What the last sync measured, see [`~rollout.drift.WeightDrift.metrics`].
    """

    def __init__(self, model, accelerator, *args, precision: str, **kwargs):
        self.precision = precision
        self.weights = PolicyWeights(model, accelerator)
        self.noise = RolloutNoise()
        self.multimodal_fields: dict = {}
        self.sync_metrics: dict[str, float] = {}
        self._laid = RolloutNoise()  # the noise that the norms carry
        self._clean_norms: dict[str, Tensor] = {}
        super().__init__(model, accelerator, *args, **kwargs)
        self.drift = WeightDrift(self.weights.trained())

    def _iter_named_params(self):
        """TRL's name for the stream of the policy's weights; FSDP1 is walked by TRL itself."""
        return super()._iter_named_params() if self.weights.sharding.fsdp_version == 1 else iter(self.weights)

    @property
    def tokenizer(self):
        return getattr(self.processing_class, "tokenizer", self.processing_class)

    # Checkpoints

    def state_dict(self) -> dict:
        """What a checkpoint must hold for a resumed run to log what an unbroken one logs. Collective."""
        return {"normalized_update": self.drift.update_since_sync(self._iter_named_params())}

    def load_state_dict(self, state: dict) -> None:
        self.drift.resumed_update = state["normalized_update"]

    # Noise

    def read_norms(self) -> dict[str, Tensor]:
        """Clean weights of the norms that are noised, by the engine's names, in the order of the layers."""
        raise NotImplementedError

    def write_norms(self, values: dict[str, Tensor]) -> None:
        """Writes norm weights in place and forgets what was computed with those before."""
        raise NotImplementedError

    @torch.no_grad()
    def lay_noise(self, noise: RolloutNoise) -> None:
        """
        Lays `noise` on the engine's norms, from their clean weights: it never accumulates (QeRL eq. 8), and with sigma
        0 they come back bit for bit.
        """
        if noise == self._laid or noise.sigma == self._laid.sigma == 0:
            return
        self._clean_norms = self._clean_norms or self.read_norms()
        # The noise is keyed by the policy's names, which vLLM may map to others in the same order.
        keys = noised_norms(self.weights.model_type, self.weights.names())
        self.write_norms(
            {
                name: norm_noise(clean, noise.sigma, noise.seed, noise.step, key)
                for key, (name, clean) in zip(keys, self._clean_norms.items(), strict=True)
            }
        )
        self._laid = noise

    def forget_noise(self) -> None:
        """After a sync brought clean norm weights."""
        self._clean_norms, self._laid = {}, RolloutNoise()
