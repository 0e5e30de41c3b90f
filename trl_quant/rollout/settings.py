"""The settings of an engine, by the names that TRL's trainers have for them.

[`SamplingSettings`] says how completions are drawn. A trainer may change it between two generations. [`VLLMSettings`]
says where vLLM runs and how it is started, which is fixed from then on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class SamplingSettings:
    """
    How an engine draws completions.

    Parameters:
        temperature (`float`): Divides the logits; 0 takes the likeliest token.
        top_p (`float`): Share of the probability that the likeliest tokens must reach; 1 for all tokens.
        top_k (`int`): Number of likeliest tokens to draw from; 0 or -1 for all.
        min_p (`float` or `None`): Least probability, relative to the likeliest token's; 0 or `None` for none.
        repetition_penalty (`float`): Divides the logits of tokens that occurred before; 1 for none.
        max_completion_length (`int` or `None`): Tokens of the longest completion; `None` if only the model limits it.
        generation_kwargs (`dict`, *optional*):
            Further options by the engine's own names. They override the fields above. An option of `None` counts as
            not given.
        structured_outputs_regex (`str`, *optional*): The regular expression that vLLM's completions match.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = 0.0
    repetition_penalty: float = 1.0
    max_completion_length: int | None = 16
    generation_kwargs: dict[str, Any] = field(default_factory=dict)
    structured_outputs_regex: str | None = None

    def __post_init__(self):
        given = {name: value for name, value in (self.generation_kwargs or {}).items() if value is not None}
        object.__setattr__(self, "generation_kwargs", given)

    @property
    def most_tokens(self) -> int | None:
        """Largest number of tokens in a completion; `None` if only the model's context limits it."""
        given = self.generation_kwargs
        return given.get("max_tokens", given.get("max_new_tokens", self.max_completion_length))


@dataclass(frozen=True)
class VLLMSettings:
    """
    Where vLLM runs, and how it is started.

    Parameters:
        mode (`str`): `"colocate"` for vLLM in the trainer's process, `"server"` for one behind a server.
        server_base_url (`str`, *optional*): The server's address, which overrides `server_host` and `server_port`.
        server_host (`str`), server_port (`int`): The server's host and port.
        server_timeout (`float`): Seconds to wait for the server.
        group_port (`int`): The port over which weights are sent to the server.
        tensor_parallel_size (`int`): Number of ranks that form one engine.
        gpu_memory_utilization (`float`): Share of the device's memory that vLLM may use.
        max_model_length (`int`, *optional*): Tokens of the longest row; by default the model's own limit.
        max_num_seqs (`int`, *optional*): Number of completions that vLLM samples at a time.
        enable_sleep_mode (`bool`): Whether vLLM frees its memory between generations.
        model_impl (`str`): Whose implementation of the model vLLM runs.
        trust_remote_code (`bool`): Whether to run code that comes with the model.
    """

    mode: str = "colocate"
    server_base_url: str | None = None
    server_host: str = "0.0.0.0"
    server_port: int = 8000
    server_timeout: float = 240.0
    group_port: int = 51216
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    max_model_length: int | None = None
    max_num_seqs: int | None = None
    enable_sleep_mode: bool = False
    model_impl: str = "auto"
    trust_remote_code: bool = False

    @property
    def server_url(self) -> str:
        """The server's address."""
        return self.server_base_url or f"http://{self.server_host}:{self.server_port}"


SAMPLING = frozenset(entry.name for entry in fields(SamplingSettings))


def divided(given: Mapping[str, Any]) -> tuple[SamplingSettings, VLLMSettings]:
    """
    Divides settings by name into those of sampling and those of vLLM.

    Raises:
        `TypeError`: There is no setting of a name. The message names it.
    """
    sampling = {name: value for name, value in given.items() if name in SAMPLING}
    return SamplingSettings(**sampling), VLLMSettings(**{n: v for n, v in given.items() if n not in SAMPLING})
