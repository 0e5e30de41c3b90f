"""Damaged files: every read of the package names the file, whatever the reader raises on its bytes."""

import ast
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from places import ROOT
from sources import PACKAGE, called, modules, nodes, none
from tiny import save_tiny
from training import config, lora, make

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer, QuantPPOConfig, QuantPPOTrainer
from trl_quant.cli.options import read_config
from trl_quant.reading import DamagedFile
from trl_quant.report.runs import read_run
from trl_quant.report.trained import Trained
from trl_quant.runs.checkpoints import check_whole, read_sampled_weights
from trl_quant.runs.unfinished import read as read_generation
from trl_quant.storage.adapter import load_adapter, read_adapter_config
from trl_quant.storage.run_checkpoints import is_whole
from trl_quant.storage.source import find_source, skeleton_of
from trl_quant.tasks.data import load_prompts
from trl_quant.trainers.ppo.critic import load_critic


# Every read of the package

READS = re.compile(r"(safe_)?open|from_pretrained|(safe_)?loads?|_?load_\w+|read_text|read_bytes|from_?file|memmap")
METHODS = ("read_text", "read_bytes", "open")  # of any object, such as a path
GUARDS = ("reading", "blaming")
# Reads that no damaged file reaches
JUSTIFIED = {
    "rollout/vllm/same_device.py torch.from_file(name, True, size, dtype=torch.uint8)": "memory that a run shares",
    "rollout/vllm/trial.py json.loads(result)": "what a process that this one started has printed",
    "rollout/vllm/trial.py pickle.loads(base64.b64decode(payload))": "what the process that started this one passes on",
    "trainers/ppo/trainer.py super()._load_optimizer_and_scheduler(checkpoint)": "guarded in `QuantPrecision`",
    "trainers/ppo/trainer.py super()._load_best_model()": "guarded in `QuantPrecision`",
}


def unguarded_reads(sources: dict[str, str]) -> dict[str, int]:
    """`file call` -> line, of calls of other libraries that read files outside of a guard."""
    found = {}
    for path, text in modules(sources).items():
        if path == "reading.py":
            continue
        imported = foreign_names(text)
        guarded = {
            inside
            for node in nodes(text)
            if isinstance(node, ast.With) and any(called(item.context_expr) in GUARDS for item in node.items)
            for part in (*node.body, *(item.context_expr for item in node.items))
            for inside in ast.walk(part)
        }
        guarded |= {  # a text that is no file's has no name to tell, but its errors are told
            inside
            for node in nodes(text)
            if isinstance(node, ast.Try) and any("ValueError" in ast.unparse(h.type or node) for h in node.handlers)
            for part in node.body
            for inside in ast.walk(part)
            if called(inside) == "loads"
        }
        for node in nodes(text):
            name = called(node)
            if name is None or not READS.fullmatch(name) or node in guarded or reads_nothing(node):
                continue
            root = node.func
            while isinstance(root, ast.Attribute):
                root = root.value
            of_super = called(root) == "super" and name.startswith("_load_")
            known = getattr(root, "id", None) in imported or name in METHODS or of_super
            if known:
                found[f"{path} {ast.unparse(node)}"] = node.lineno
    return found


def foreign_names(text: str) -> set[str]:
    """Names that a file imports from other libraries; Triton's `load` reads no files."""
    names = {"open"}
    for node in nodes(text):
        if isinstance(node, ast.Import):
            names |= {
                alias.asname or alias.name.partition(".")[0]
                for alias in node.names
                if not alias.name.startswith("triton")
            }
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def reads_nothing(node: ast.Call) -> bool:
    """Whether a call opens a file to write, or `os.devnull`, or parses a copy or a value of the command line."""
    arguments = [ast.unparse(part) for part in (*node.args, *(keyword.value for keyword in node.keywords))]
    if called(node) == "open":
        return bool({"os.devnull", "'w'", "'a'", "'wb'"} & set(arguments))
    return bool(arguments) and arguments[0].startswith(("json.dumps(", "options."))


def test_every_read_is_guarded():
    found = unguarded_reads({str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / PACKAGE).rglob("*.py")})
    new = {place: line for place, line in found.items() if place not in JUSTIFIED}
    none([f"{place}, line {line}: put it into `with reading(...)`" for place, line in new.items()])
    none([f"{place} is no read any more" for place in JUSTIFIED if place not in found])
    made_up = {
        "trl_quant/x.py": """import json, torch, triton.language as tl
from transformers import AutoConfig
from .reading import reading
from .own import load_named
with reading(path): a = torch.load(path)
with told(), reading(path), path.open() as file: b = file
c = json.loads(json.dumps(a)) or tl.load(pointer) or load_named(path) or self.linear.load(tensor)
d = torch.load(path)
with told(path): e = AutoConfig.from_pretrained(path).load()
f = lambda: path.read_text()
class Own(Trainer):
    def _load_rng_state(self, checkpoint): super()._load_rng_state(checkpoint)
"""
    }
    assert unguarded_reads(made_up) == {
        "x.py torch.load(path)": 8,
        "x.py AutoConfig.from_pretrained(path)": 9,
        "x.py path.read_text()": 10,
        "x.py super()._load_rng_state(checkpoint)": 12,
    }


# What the readers raise


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A run of each kind with its checkpoint, a base and an adapter, a tokenizer, data, a log and a YAML file."""
    place = tmp_path_factory.mktemp("written")
    base = save_tiny(place / "base", seed=3)
    common = {"rollout_precision": "int4", "max_steps": 3, "save_strategy": "steps", "save_steps": 3}
    grpo = {**common, "num_iterations": 2, "steps_per_generation": 1}
    adapted = config(QuantGRPOConfig, place / "grpo", **grpo)
    make(QuantGRPOTrainer, adapted, model=base, peft_config=lora()).train()
    ppo = config(QuantPPOConfig, place / "ppo", **common, num_generations=1)
    make(QuantPPOTrainer, ppo, model=base).train()
    rows = Dataset.from_dict({"prompt": [f"{number} + 1 =" for number in range(50)]})
    rows.to_parquet(place / "rows.parquet"), rows.to_json(place / "rows.jsonl"), rows.to_csv(place / "rows.csv")
    (place / "log").mkdir()
    lines = [json.dumps({"step": step, "reward": step / 7, "loss": 0.1}) for step in range(1, 20)]
    (place / "log/metrics.jsonl").write_text("\n".join(lines) + "\n")
    (place / "options.yaml").write_text("trainer: grpo\nlearning_rate: 1.0e-5\nreport_to: [none]\n" * 3)
    return place


def of_model(path: Path) -> None:
    """Reads a base as `prepare`, `eval` and the critic read it."""
    find_source(str(path), None, False).layers()
    found = Trained.find(str(path))
    found.tokenizer()
    found.policy("bf16", torch.float32, merged=False)
    load_critic(str(path), config(QuantPPOConfig, path.parent / "out", num_generations=1))


def of_adapter(path: Path) -> None:
    """Reads an adapter as `export` and `eval` read it."""
    read_adapter_config(path)
    load_adapter(path, skeleton_of(path.parents[1] / "base"), {})
    Trained.find(str(path)).policy("bf16", torch.float32, merged=False)


def of_run(trainer_class, config_class, **settings) -> Callable[[Path], None]:
    """Returns a function that reads a checkpoint as a resumed run does, with a trainer that has an optimizer."""

    def read(path: Path) -> None:
        if "trainer" not in settings:
            own = {"rollout_precision": "int4", "max_steps": 1, **settings.pop("own", {})}
            args = config(config_class, path.parents[1] / "other", **own)
            settings["trainer"] = make(
                trainer_class, args, model=str(path.parents[1] / "base"), **settings.pop("given")
            )
            settings["trainer"].train()
        trainer = settings["trainer"]
        if not is_whole(path):
            raise DamagedFile(f"{path} is not resumed")
        check_whole(str(path))
        trainer._load_from_checkpoint(str(path))
        trainer._load_optimizer_and_scheduler(str(path))
        trainer._load_rng_state(str(path))
        for name in ("initial_weights", "synced_weights"):
            read_sampled_weights(path, name)
        read_generation(path / "unfinished_generation_0.pt", torch.device("cpu"))

    return read


GRPO = of_run(QuantGRPOTrainer, QuantGRPOConfig, given={"peft_config": lora()})
PPO = of_run(QuantPPOTrainer, QuantPPOConfig, given={}, own={"num_generations": 1})
KINDS: list[tuple[str, str, Callable[[Path], object]]] = [  # place in `written`, its files, how it is read
    ("base", "*.json", of_model),
    ("base", "*.safetensors", of_model),
    ("grpo/checkpoint-3", "*.pt*", GRPO),
    ("grpo/checkpoint-3", "*_state.json", GRPO),
    ("ppo/checkpoint-3", "critic/*", PPO),
    ("grpo/checkpoint-3", "adapter*", of_adapter),
    ("rows.parquet", "", lambda path: load_prompts(str(path))),
    ("rows.jsonl", "", lambda path: load_prompts(str(path))),
    ("rows.csv", "", lambda path: load_prompts(str(path))),
    ("log", "*", read_run),
    ("options.yaml", "", lambda path: read_config(str(path))),
]


def damages(data: bytes, seed: int, count: int):
    """Yields bytes of a file of which one bit is another, mostly near the start, where headers are; then cut ones."""
    drawn = random.Random(seed)
    for number in range(count):
        place = drawn.randrange(len(data) if number % 2 else min(len(data), 600))
        yield data[:place] + bytes([data[place] ^ 1 << drawn.randrange(8)]) + data[place + 1 :]
    yield from (b"", data[: len(data) // 2])


@pytest.mark.parametrize(("place", "names", "read"), KINDS, ids=[f"{place} {names}" for place, names, _ in KINDS])
def test_whatever_is_damaged_is_named(written, place, names, read):
    """A bit of each file is flipped, and each is cut. What is read then is right, or one error names the place."""
    place, failed = written / place, {}
    read(place)
    files = sorted(place.glob(names)) if names else [place]
    for number, file in enumerate(files):
        whole, raised = file.read_bytes(), 0
        try:
            for data in damages(whole, number, 8):
                file.write_bytes(data)
                try:
                    read(place)
                except (ValueError, OSError) as error:
                    raised += 1
                    assert str(place) in str(error), f"{file}: {error!r}"
        finally:
            file.write_bytes(whole)
        failed[file.name] = raised
    assert sum(failed.values()) >= 2, failed
