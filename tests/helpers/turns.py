"""
Generations of several turns for the tests: a tokenizer that reads a call of a tool in whatever was written, and what
an engine does between the turns.
"""

from itertools import pairwise

from datasets import Dataset
from tiny import tiny_tokenizer
from training import PROMPTS, config, make, trainer_for

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.trainers.launch import TRAINERS


# Every message as in ChatML, calls of tools in front of the content
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['tool_calls'] | default('') }}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def note() -> str:
    """Takes a note."""
    return "ok"


def calling_tokenizer():
    """A tokenizer that reads a call of [`note`] in every completion."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template, tokenizer.response_schema = TEMPLATE, {}
    call = {"type": "function", "function": {"name": "note", "arguments": {}}}

    def parse_response(ids, **kwargs):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        return {"role": "assistant", "content": text, "tool_calls": [call]}

    tokenizer.parse_response = parse_response
    return tokenizer


def conversations(n: int) -> Dataset:
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": PROMPTS[i % len(PROMPTS)]}] for i in range(n)]})


def spread_of_messages(completions, **kwargs) -> list[float]:
    texts = ["".join(message["content"] for message in messages) for messages in completions]
    return [sum(ord(c) % 7 for c in text) / (6 * max(len(text), 1)) for text in texts]


def with_tools(
    path, model, turns: int, tool=note, reward=spread_of_messages, kind=QuantGRPOTrainer, options=None, **overrides
) -> QuantGRPOTrainer:
    """A trainer whose completions take `turns` turns of at most four tokens."""
    short = "max_tokens" if overrides.get("use_vllm") else "max_new_tokens"
    settings = {
        "max_completion_length": 160,
        "max_tool_calling_iterations": turns - 1,
        "generation_kwargs": {short: 4},
        "max_steps": 3,
    }
    return make(
        kind,
        config(QuantGRPOConfig, path / "out", **settings | overrides),
        model=model,
        reward_funcs=reward,
        processing_class=calling_tokenizer(),
        train_dataset=conversations(64),
        **{"tools": [tool]} | (options or {}),
    )


VLLM = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 512}


def in_vllm() -> dict:
    from vllm_engines import SMALL

    return VLLM | {"vllm_engine_kwargs": SMALL}


def noted(generation) -> tuple[list[str], list[float]]:
    """What an engine does from now on, in order, and the sum of the norms that each turn samples with."""
    sampler, events, norms = generation.engine, [], []

    def noting(name: str, call):
        def noted(*args, **kwargs):
            events.append(name)
            return call(*args, **kwargs)

        return noted

    draw = sampler.draw

    def turn(*args, **kwargs):
        output = draw(*args, **kwargs)
        norms.append(sum(norm.double().sum().item() for norm in sampler.read_norms().values()))
        return output

    sampler.draw = noting("turn", turn)
    sampler.sync = noting("sync", sampler.sync)
    sampler.write_norms = noting("noise", sampler.write_norms)
    return events, norms


def put_to_sleep(sampler, level: int, events: list[str]) -> None:
    """Puts an engine to sleep now, and after each generation."""

    def sleep(level: int):
        events.append("sleep")
        if level == 2:
            sampler.llm.apply_model(lambda model: [parameter.data.zero_() for parameter in model.parameters()] and None)

    sampler.llm.sleep = sleep
    sampler.llm.wake_up = lambda tags: events.extend(f"wake {tag}" for tag in tags)
    sampler.sleep_level = level
    sampler.rest()
    events.clear()


def generations(events: list[str], end: str) -> list[list[str]]:
    """`events`, cut after each `end`."""
    ends = [i + 1 for i, event in enumerate(events) if event == end]
    assert ends[-1] == len(events)
    return [events[start:stop] for start, stop in pairwise([0, *ends])]


def answer(prompts, **others) -> dict:
    one = {"prompt_ids": [1], "completion_ids": [65, 257], "logprobs": [-1.0, -1.0]} | others
    return {name: value if value is None else [value] * len(prompts) for name, value in one.items()}


def build(path, kind: str, given: dict, **overrides):
    """A trainer of one step, whose model calls the tool `note` in every completion."""
    settings = {"max_completion_length": 160, "generation_kwargs": {"max_new_tokens": 4}, "max_steps": 1}
    settings |= {"per_device_train_batch_size": 2, "num_generations": 2, "rollout_precision": "int8"} | overrides
    options = {"processing_class": calling_tokenizer(), "train_dataset": conversations(64)} | given
    settings |= {"beta": 0.0} if kind == "rloo" else {"max_tool_calling_iterations": 1}
    settings |= {"vf_share_layers": True} if kind == "ppo" else {}
    options = ({"reward_funcs": spread_of_messages} if kind != "distillation" else {}) | options
    return trainer_for(path / "out", kind=TRAINERS[kind], **options, **settings)
