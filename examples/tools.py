"""GRPO with a tool and INT8 samples, on a CPU, in a few minutes: a small model that has a calculator, but a poor one.

    python examples/tools.py

The model (arithmetic_model) was taught to add and subtract column by column, and is right on a third of its sums:

    347+588=   7+8+0=5c1 4+8+1=3c1 3+5+1=9c0 #### 935

Each `=` ends a turn and asks the calculator, which writes the digit and the carry where nothing is carried. Where
something is, it says nothing, and the model has to go on by itself. `reward` shows whether that ends well, and
`mismatch/by_turn/*` how far the INT8 sampler is from the policy before and after the calculator spoke. What the
calculator wrote is not trained on, and counts in no metric.

Any model works the same way whose tokenizer has a chat template with tools. This one is too small for such a format, so
`Calculating` says what a call looks like, and `TEMPLATE` what becomes of its result.
"""

import re
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.tasks import arithmetic_reward, load_prompts


MODEL = Path(__file__).parent / "arithmetic_model"
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% for call in message['tool_calls'] | default([]) %}"
    "{{ call['function']['name'] }}{{ call['function']['arguments'] }}{% endfor %}{% endfor %}"
)
SETTINGS = {
    "output_dir": "runs/tools",
    "rollout_precision": "int8",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "per_device_train_batch_size": 64,
    "num_generations": 8,
    "max_completion_length": 48,  # what the calculator writes included
    "max_tool_calling_iterations": 4,
    "learning_rate": 1e-4,
    "max_steps": 40,
    "logging_steps": 5,
    "report_to": "none",
}


def column(digits: str) -> str:
    """
    Adds or subtracts one column, if nothing is carried or borrowed.

    Args:
        digits: Two digits and the carry or borrow of the column before, such as 3+4+0 or 8-4-0.

    Returns:
        The digit to write and the carry `c` or borrow `b`, such as 7c0 or 4b0. Nothing where the calculator is at a
        loss, so that the model goes on by itself.
    """
    first, second, before = map(int, re.split("[+-]", digits))
    sign, letter = (1, "c") if "+" in digits else (-1, "b")
    total = first + sign * (second + before)
    return f"{total}{letter}0 " if before == 0 and total in range(10) else ""


class Calculating(PreTrainedTokenizerFast):
    """A tokenizer that reads a call of `column` in a turn that ends like `7+8+0=`."""

    response_schema: dict = {}  # it has one: TRL then asks `parse_response`

    def parse_response(self, response, schema=None, **others) -> dict:
        text = self.decode(response, skip_special_tokens=True)
        message = {"role": "assistant", "content": text}
        asked = re.search(r"(\d([+-])\d\2\d)=$", text)
        if asked:
            call = {"name": "column", "arguments": {"digits": asked[1]}}
            message["tool_calls"] = [{"type": "function", "function": call}]
        return message


def conversation(row: dict) -> dict:
    return {"prompt": [{"role": "user", "content": row["prompt"]}]}


def main(**overrides) -> QuantGRPOTrainer:
    """Trains with `SETTINGS` and these overrides, and returns the trainer."""
    tokenizer = Calculating.from_pretrained(MODEL)
    tokenizer.chat_template = TEMPLATE
    ends_a_turn = {"eos_token_id": tokenizer.convert_tokens_to_ids("=")}
    trainer = QuantGRPOTrainer(
        model=str(MODEL),
        reward_funcs=arithmetic_reward,
        args=QuantGRPOConfig(**SETTINGS | {"generation_kwargs": ends_a_turn} | overrides),
        train_dataset=load_prompts(str(MODEL / "train.jsonl")).map(conversation),
        processing_class=tokenizer,
        tools=[column],
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
