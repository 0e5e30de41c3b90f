"""
House rules that some of our code still breaks. `violators.json` counts how often each file does, and a count may only
shrink.

A new violation fails a test. One that was mended fails it too until its count is lowered:
`python tests/pages/test_ratchet.py` writes the lower counts, and refuses higher ones.
"""

import ast
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import pytest


PACKAGE = Path(__file__).parents[2] / "trl_quant"  # as a script it finds no helper
STORED = Path(__file__).with_name("violators.json")

# Rooms that import TRL for good; the others get an engine, a spec or a tensor. Our client of a vLLM server is TRL's
# client with limits and checks, so it may inherit from it
TRLS = ("trainers/", "runs/", "config/", "rollout/trl_face.py", "rollout/vllm/client.py", "trl_seams.py", "cli/")
# Rooms that may take a trainer
ABOVE = ("trainers/", "runs/", "cli/")
HOME = "run_spec.py"  # of each default that follows from other fields
HANDS_OVER = "arguments_seen"  # of trl_seams.py: the one place in which TRL sees other arguments
DERIVED = {"rollout_precision", "is_correction", "lora_sync", "sleep_level", "vllm_sleep_level"}
VAGUE = {"of", "beside", "part", "unread"}  # a parameter is a noun
DISGUISES = {"__class__", "__getattr__", "__setattr__"}  # of an object that poses as another

Found = Iterator[ast.AST]


def parameters(node: ast.AST) -> list[ast.arg]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return []
    given = node.args
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]


def called(node: ast.AST) -> str | None:
    return getattr(node.func, "attr", getattr(node.func, "id", None)) if isinstance(node, ast.Call) else None


def is_args(node: ast.AST) -> bool:
    """Whether an expression is a run's arguments: `args`, `self.args`, `trainer.args`, `training_args`."""
    name = getattr(node, "attr", getattr(node, "id", ""))
    return name in ("args", "training_args")


def imports_of_trl(path: str, tree: ast.Module) -> Found:
    """Only the rooms that face TRL import it, and the one class of an engine that inherits from TRL's: the client."""
    for node in ast.walk(tree) if not path.startswith(TRLS) else ():
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        if any(name.partition(".")[0] == "trl" for name in names):
            yield node


def trainers_taken(path: str, tree: ast.Module) -> Found:
    """Nothing below `trainers/` takes a trainer."""
    for node in ast.walk(tree) if not path.startswith(ABOVE) else ():
        if any(parameter.arg == "trainer" for parameter in parameters(node)):
            yield node


def writes_to_args(path: str, tree: ast.Module) -> Found:
    """
    A run's arguments are not written once its description exists. What TRL's constructor must see differently is handed
    to it in one place, `arguments_seen`.
    """
    allowed = [node for node in ast.walk(tree) if path == "trl_seams.py" and getattr(node, "name", "") == HANDS_OVER]
    exempt = {child for node in allowed for child in ast.walk(node)}
    for node in ast.walk(tree):
        if node in exempt:
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_args(node.value):
            yield node
        first = node.args[0] if isinstance(node, ast.Call) and node.args else None
        if first is not None and called(node) in ("setattr", "exchanged") and is_args(first):
            yield node
        table = node.func.value if called(node) == "update" and isinstance(node.func, ast.Attribute) else None
        if called(table) == "vars" and table.args and is_args(table.args[0]):
            yield node


def names_of_the_precision(path: str, tree: ast.Module) -> Found:
    """Outside `config/`, a run's precision is read from its description, not from a field's name."""
    if path.startswith("config/"):
        return
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        names = {getattr(node, "attr", None), getattr(node, "id", None), getattr(node, "arg", None), text}
        if "rollout_precision" in names:
            yield node


def forwards(method: ast.FunctionDef) -> bool:
    """Whether an accessor of attributes reaches into another object, instead of leaving all but one name to `super`."""
    calls = {called(node) for node in ast.walk(method)}
    return method.name not in calls or not calls.isdisjoint({"getattr", "setattr"})


def disguises(path: str, tree: ast.Module) -> Found:
    """No class poses as another one: none has a `__class__` of its own, or passes attributes on to another object."""
    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in owner.body:
            if isinstance(node, ast.FunctionDef) and node.name in DISGUISES and forwards(node):
                yield node


def is_literal(node: ast.AST | None) -> bool:
    """Whether an expression is a value, or one of two values."""
    if isinstance(node, ast.IfExp):
        return is_literal(node.body) and is_literal(node.orelse)
    return isinstance(node, ast.Constant) and node.value is not None


def homes_of_a_default(path: str, tree: ast.Module) -> Found:
    """A default that follows from other fields has one home, `run_spec.py`."""
    for node in ast.walk(tree) if path != HOME else ():
        pairs = []
        if isinstance(node, ast.Assign | ast.AnnAssign):
            pairs = [(target, node.value) for target in getattr(node, "targets", None) or [node.target]]
        elif isinstance(node, ast.Dict):
            pairs = list(zip(node.keys, node.values, strict=True))
        elif isinstance(node, ast.FunctionDef):
            named = [*node.args.posonlyargs, *node.args.args]
            pairs = list(zip(reversed(named), reversed(node.args.defaults), strict=False))
            pairs += zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        for name, value in pairs:
            called_so = {getattr(name, field, None) for field in ("attr", "id", "arg", "value")}
            if is_literal(value) and any(isinstance(text, str) and text in DERIVED for text in called_so):
                yield node


def exchanges_of_ours(path: str, tree: ast.Module) -> Found:
    """`exchanged` acts on what belongs to a host library, never on an object of ours."""
    for node in ast.walk(tree):
        owner = node.args[0] if called(node) == "exchanged" and node.args else None
        is_own = isinstance(owner, ast.Attribute) and getattr(owner.value, "id", None) == "self"
        if getattr(owner, "id", None) == "self" or (is_own and owner.attr not in ("args", "trainer")):
            yield node


def vague_parameters(path: str, tree: ast.Module) -> Found:
    """No parameter is a preposition, or has three meanings."""
    for node in ast.walk(tree):
        yield from (parameter for parameter in parameters(node) if parameter.arg in VAGUE)


def riddles(path: str, tree: ast.Module) -> Found:
    """No conditional inside of another, no walrus in a call, no attribute with a computed default."""
    for node in ast.walk(tree):
        inside = [child for child in ast.walk(node) if child is not node]
        if isinstance(node, ast.IfExp) and any(isinstance(child, ast.IfExp) for child in inside):
            yield node
        if isinstance(node, ast.Call):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            yield from (value for value in given if isinstance(value, ast.NamedExpr))
            if called(node) == "getattr" and len(node.args) == 3 and isinstance(node.args[2], ast.Call):
                yield node


RULES: dict[str, Callable[[str, ast.Module], Found]] = {
    rule.__name__: rule
    for rule in (
        *(imports_of_trl, trainers_taken, writes_to_args, names_of_the_precision),
        *(disguises, homes_of_a_default, exchanges_of_ours, vague_parameters, riddles),
    )
}


parsed = cache(ast.parse)


def counts(rule: str, sources: dict[str, str]) -> dict[str, int]:
    """How often each file breaks a rule; only the files that do."""
    found = {path: sum(1 for _ in RULES[rule](path, parsed(text))) for path, text in sources.items()}
    return {path: count for path, count in sorted(found.items()) if count}


def package() -> dict[str, str]:
    return {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in PACKAGE.rglob("*.py")}


@pytest.mark.parametrize("rule", RULES)
def test_no_new_violation(rule):
    found, stored = counts(rule, package()), json.loads(STORED.read_text())[rule]
    more = {path: count for path, count in found.items() if count > stored.get(path, 0)}
    assert not more, f"{RULES[rule].__doc__} These break it more often than before: {more}"
    assert found == stored, "There are fewer now: run `python tests/pages/test_ratchet.py`, which lowers the counts."


def test_the_rules_are_all_stored():
    assert json.loads(STORED.read_text()).keys() == RULES.keys()


MADE_UP = {
    "imports_of_trl": (
        {
            "storage/x.py": "import trl\ndef f():\n    from trl.core import y\n",
            "rollout/vllm/server.py": "import trl\n",
            "rollout/vllm/client.py": "from trl.generation.vllm_client import VLLMClient\n",
            "config/x.py": "import trl\n",
        },
        {"rollout/vllm/server.py": 1, "storage/x.py": 2},
    ),
    "trainers_taken": (
        {"policy/x.py": "def f(trainer): ...\ndef g(model): ...\n", "trainers/x.py": "def f(trainer): ...\n"},
        {"policy/x.py": 1},
    ),
    "writes_to_args": (
        {
            "trainers/x.py": "args.beta = 1\nself.args.x = 2\nsetattr(training_args, 'x', 1)\nvars(args).update(x=1)\n"
            "exchanged(trainer.args, x=1)\nargs = 3\nself.beta = args.beta\nvars(other).update(x=1)\n",
            "trl_seams.py": "def arguments_seen(args): return exchanged(args)\ndef f(args): return exchanged(args)\n",
        },
        {"trainers/x.py": 5, "trl_seams.py": 1},
    ),
    "names_of_the_precision": (
        {
            "report/x.py": "a.rollout_precision\nf(rollout_precision='int8')\na['rollout_precision']\nprecision\n",
            "config/x.py": "args.rollout_precision\n",
        },
        {"report/x.py": 3},
    ),
    "disguises": (
        {
            "a.py": "def __getattr__(name): ...\nclass A:\n    def __setattr__(self, n, v): ...\n"
            "    def __getattr__(self, n):\n        return getattr(self.x, n) if n == 'y' else super().__getattr__(n)\n"
            "class B:\n    @property\n    def __class__(self): return A\n",
            "b.py": "class A:\n    def __setattr__(self, n, v):\n        self.told = n == 'weight'\n"
            "        super().__setattr__(n, v)\n",
        },
        {"a.py": 3},
    ),
    "homes_of_a_default": (
        {
            "a.py": "class A:\n    lora_sync: str = 'merge'\n    sleep_level: int = field(default=2)\n"
            "def f(a, lora_sync='merge', *, sleep_level=1): ...\nd = {'lora_sync': 'merge', 'x': 1}\n"
            "self.vllm_sleep_level = 1 if a else 2\nlora_sync = None\nlora_sync = spec.lora_sync\n",
            "run_spec.py": "lora_sync = 'merge'\n",
        },
        {"a.py": 5},
    ),
    "exchanges_of_ours": (
        {
            "a.py": "exchanged(self, x=1)\nexchanged(self.weights, x=1)\nexchanged(self.args, x=1)\n"
            "exchanged(self.trainer, x=1)\nexchanged(trainer, x=1)\nexchanged(self.trainer.state, x=1)\n"
        },
        {"a.py": 2},
    ),
    "vague_parameters": ({"a.py": "def f(of, *, part=1): ...\ndef g(rows): ...\nlambda beside: 1\n"}, {"a.py": 3}),
    "riddles": (
        {
            "a.py": "x = 1 if a else 2 if b else 3\nf(y := 1)\ngetattr(a, 'b', c())\n"
            "getattr(a, 'b', None)\nz = 1 if a else 2\n"
        },
        {"a.py": 3},
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_finds_its_violators(rule):
    sources, expected = MADE_UP[rule]
    assert counts(rule, sources) == expected


def lower() -> None:
    """Writes the counts of today, none of which may be higher than before."""
    before = json.loads(STORED.read_text()) if STORED.is_file() else None
    now = dict(zip(RULES, map(partial(counts, sources=package()), RULES), strict=True))
    for rule, found in now.items() if before else ():
        if any(count > before.get(rule, {}).get(path, 0) for path, count in found.items()):
            sys.exit(f"{rule}: mend what is new first. {RULES[rule].__doc__}")
    STORED.write_text(json.dumps(now, indent=1) + "\n")
    print({rule: Counter(found).total() for rule, found in now.items()})


if __name__ == "__main__":
    lower()
