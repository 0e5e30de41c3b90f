"""A model of which each token's chances are known from the token before, for the tests of `trl-quant eval`."""

import json
import math
from pathlib import Path

import torch
from tiny import tiny_model, tiny_tokenizer


CHANCES = {"a": {"3": 0.6, "4": 0.3, "5": 0.06, "6": 0.04}, "b": {"7": 0.5, "8": 0.3, "9": 0.2}, "c": {"1": 1.0}}
QUESTIONS = [{"prompt": f"{i}{name}", "answer": likely} for i in range(2) for name, likely in zip("abc", "371")]


def save_known(path: Path, chat: bool = False) -> str:
    """A model without attention: the last token, one-hot, decides. A digit ends the text."""
    model = tiny_model("qwen3", tied=False, hidden_size=384, num_hidden_layers=1)
    token = {text: tiny_tokenizer()(text)["input_ids"][0] for text in "abc0123456789"}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(torch.eye(320, 384))
        logits = torch.full((320, 384), -30.0)
        for before, chances in CHANCES.items():
            for after, chance in chances.items():
                logits[token[after], token[before]] = math.log(chance)
        logits[257, [token[digit] for digit in "0123456789"]] = 30.0
        model.lm_head.weight.copy_(logits / math.sqrt(384))
    model.save_pretrained(path)
    tokenizer = tiny_tokenizer()
    if not chat:
        tokenizer.chat_template = None
    tokenizer.save_pretrained(path)
    return str(path)


def write(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def command(known: str, tmp_path: Path) -> list[str]:
    """An evaluation of the known model."""
    data = write(tmp_path / "data.jsonl", *QUESTIONS)
    options = {"task": "jsonl", "data": data, "output": tmp_path / "out.json", "max_completion_length": 4}
    options |= {"dtype": "float32", "batch_size": 16}
    return ["eval", known, *(str(part) for name, value in options.items() for part in (f"--{name}", value))]


def result(tmp_path: Path, name: str = "out") -> dict:
    return json.loads((tmp_path / f"{name}.json").read_text())


def rows(tmp_path: Path, name: str = "out") -> list[dict]:
    return [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()][1:]
