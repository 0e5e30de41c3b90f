"""The rules of CONTRIBUTING.md that can be read from the sources: who imports what, which names cross files, and more.

A rule is a function from sources to violations. Each test shows that ours have none, and that the rule finds those of
made-up sources.
"""

import ast
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath

import pytest
from places import ROOT

from trl_quant.formats import FORMATS


PACKAGE = "trl_quant"
FOLDERS = (PACKAGE, "examples", "benchmarks", "tests")
MAX_LINES = 500

# Who may import what not everyone may; `...` stands for any file
RESTRICTED = {
    "trl": ("trainers/...", "config/...", "rollout/...", "trl_seams.py", "cli/..."),
    "vllm": ("rollout/vllm/...", "rollout/vllm_server_worker.py"),
    "triton": ("kernels/...",),
    "llmcompressor": ("scaling/modifier.py", "storage/awq.py"),
}
# Pure rooms: the libraries beside the standard one and the files of ours that they may import
PURE = {
    "formats/...": ({"torch"}, ("formats/...",)),
    "corrections/...": ({"torch"}, ("corrections/...",)),
    "noise/...": ({"torch"}, ("noise/...", "models/...")),
    "models/...": ({"torch"}, ("models/...",)),
    "precisions.py": ({"torch"}, ("formats/...",)),
    "rollout/engine.py": (set(), ()),
    "run_spec.py": (set(), ("precisions.py",)),
    "layers/...": ({"torch"}, ("layers/...", "formats/...", "precisions.py")),
    "kernels/...": ({"torch", "triton"}, ("kernels/...", "formats/...")),
}
# `cli/` parses arguments for the other rooms, so none of them imports it. An example may be a command of its own.
BELOW_CLI = (f"{PACKAGE}/...", "benchmarks/...", "notebooks/...", "examples/...")
ABOVE = (f"{PACKAGE}/cli/...",)
COMMAND_OF_EXAMPLES = f"{PACKAGE}.cli.train"
# What they may import on top of that inside a function, for those who call it
LAZY = {"layers/...": ({"triton"}, ("kernels/...",))}

# Private names of other libraries that we use, by the file that has them
FOREIGN = {
    "os.py": "_exit",
    "threading.py": "_register_atexit",
    "typing.py": "_is_protocol",
    "_pytest/runner.py": "_setupstate",
    "torch/_C/__init__.pyi": "_version",
    "torch/_meta_registrations.py": "_flash_attention_backward _flash_attention_forward _int_mm",
    "torch/_dynamo/__init__.py": "_dynamo",
    "torch/_dynamo/eval_frame.py": "_orig_mod",
    "torch/cpu/__init__.py": "_is_amx_tile_supported _is_avx512_supported",
    "torch/nn/modules/module.py": "_forward_hooks _forward_pre_hooks _modules _parameters",
    "torch/nn/parallel/distributed.py": "_ddp_params_and_buffers_to_ignore",
    "torch/utils/_python_dispatch.py": "_python_dispatch",
    "accelerate/commands/launch.py": "_validate_launch_command",
    "transformers/configuration_utils.py": "_attn_implementation _commit_hash",
    "transformers/generation/utils.py": "_get_logits_processor",
    "transformers/modeling_utils.py": "_supports_sdpa",
    "transformers/training_args.py": "_VALID_DICT_FIELDS",
    "transformers/trainer.py": """_get_grad_norm _get_output_dir _load_best_model _load_from_checkpoint
        _load_optimizer_and_scheduler _load_rng_state _save_checkpoint _save_optimizer_and_scheduler
        _train_batch_size""",
    "peft/tuners/lora/config.py": "_register_custom_module",
    "peft/tuners/tuners_utils.py": "_cast_input_dtype",
    "trl/trainer/grpo_trainer.py": """_compute_loss _generate _generate_and_score_completions _generate_single_turn
        _get_per_token_logps_and_entropies _last_loaded_step _calculate_rewards _logs _metrics _pending_extra_logs
        _pending_metrics _step _tag_names _tool_call_loop _tokenize_prompts""",
    "trl/trainer/distillation_trainer.py": "_get_last_hidden_state",
    "trl/kernels/chunked_logprob.py": "_use_triton",
    "trl/generation/vllm_generation.py": "_init_vllm",
    "trl/generation/vllm_client.py": "_post",
    "vllm/_custom_ops.py": "_C _custom_ops",
    "vllm/model_executor/layers/attention/attention.py": """_k_scale _k_scale_float _q_scale _q_scale_float _v_scale
        _v_scale_float""",
    "vllm/model_executor/kernels/linear/__init__.py": "_POSSIBLE_INT8_KERNELS",
    "vllm/model_executor/models/registry.py": "_run_in_subprocess",
}

# Where precisions may be listed: the table, and what has a file or a kernel for each of them anyway
LISTS_OF_PRECISIONS = ("precisions.py", "formats/...", "kernels/quantize.py")

Sources = dict[str, str]  # path from the root -> text
Violations = list[str]


@pytest.fixture(scope="module")
def sources() -> Sources:
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parsed(text)))


def modules(sources: Sources) -> dict[str, str]:
    """The sources of the package, by their paths in it."""
    return {path.removeprefix(f"{PACKAGE}/"): text for path, text in sources.items() if path.startswith(f"{PACKAGE}/")}


def matches(module: str, patterns) -> bool:
    return any(module == p or (p.endswith("...") and module.startswith(p[:-3])) for p in patterns)


def called(node: ast.AST) -> str | None:
    """Name of the function that a node calls."""
    return getattr(node.func, "attr", getattr(node.func, "id", None)) if isinstance(node, ast.Call) else None


def strings(nodes: list[ast.AST | None]) -> list[str]:
    """The literal strings among some nodes."""
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def none(violations: Violations) -> None:
    assert not violations, "\n" + "\n".join(violations)


# Imports


def imports(module: str, text: str) -> Iterator[tuple[str, bool, int]]:
    """`(dotted name in full, whether at import time, line)` of all that a file of the package imports."""
    parents = [PACKAGE, *PurePosixPath(module).parent.parts]
    functions = [node for node in nodes(text) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lazy = {child for function in functions for child in ast.walk(function)}
    for node in nodes(text):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            name = ".".join([*base, *filter(None, [node.module])])
            packages = node.module is None or name == PACKAGE
            names = [f"{name}.{alias.name}" for alias in node.names] if packages else [name]
        elif called(node) in ("import_module", "__import__"):
            names = strings(node.args[:1])
        for name in names:
            yield name, node not in lazy, node.lineno


def restricted_imports(sources: Sources) -> Violations:
    return [
        f"{PACKAGE}/{module}:{line} imports {name}; only {', '.join(allowed)} may"
        for module, text in modules(sources).items()
        for name, _, line in imports(module, text)
        if (allowed := RESTRICTED.get(name.partition(".")[0])) and not matches(module, allowed)
    ]


def impure_imports(sources: Sources) -> Violations:
    found = []
    for module, text in modules(sources).items():
        rules = [rule for pattern, rule in PURE.items() if matches(module, [pattern])]
        lazy = [rule for pattern, rule in LAZY.items() if matches(module, [pattern])]
        for name, at_import, line in imports(module, text) if rules else ():
            allowed = rules if at_import else rules + lazy
            top, _, inside = name.partition(".")
            path = inside.replace(".", "/")
            if top == PACKAGE:
                fine = any(matches(path + end, rooms) for _, rooms in allowed for end in ("/", ".py"))
            else:
                fine = top in sys.stdlib_module_names or any(top in libraries for libraries, _ in allowed)
            if not fine:
                libraries, rooms = rules[0]
                found.append(f"{PACKAGE}/{module}:{line} imports {name}; it may {', '.join([*libraries, *rooms])}")
    return found


def imports_of_cli(sources: Sources) -> Violations:
    found = []
    for path, text in sources.items():
        if not matches(path, BELOW_CLI) or matches(path, ABOVE):
            continue
        for name, _, line in imports(path.removeprefix(f"{PACKAGE}/"), text):
            of_cli = name == f"{PACKAGE}.cli" or name.startswith(f"{PACKAGE}.cli.")
            if of_cli and not (path.startswith("examples/") and name == COMMAND_OF_EXAMPLES):
                found.append(f"{path}:{line} imports {name}; it wants a function of a room")
    return found


def test_restricted_imports(sources):
    none(restricted_imports(sources))
    made_up = {
        "trl_quant/noise/x.py": "import os, vllm.lora\ndef f():\n    from trl.core import y\n",
        "trl_quant/rollout/x.py": "import trl\nif trl:\n    import importlib\n    importlib.import_module('vllm')\n",
        "trl_quant/rollout/vllm/x.py": "import trl, vllm\n",
        "trl_quant/cli/x.py": "import triton\n",
        "tests/x.py": "import vllm\n",
    }
    assert [line.partition(";")[0] for line in restricted_imports(made_up)] == [
        "trl_quant/noise/x.py:1 imports vllm.lora",
        "trl_quant/noise/x.py:3 imports trl.core",
        "trl_quant/rollout/x.py:4 imports vllm",
        "trl_quant/cli/x.py:1 imports triton",
    ]


def test_rooms_import_no_command(sources):
    notebooks = {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        lines = "".join("".join(cell["source"]) + "\n" for cell in cells).splitlines()
        notebooks[f"notebooks/{path.name}"] = "\n".join(line for line in lines if not line.startswith(("%", "!")))
    assert len(notebooks) > 2
    none(imports_of_cli(sources | notebooks))
    made_up = {
        "trl_quant/report/x.py": "from ..cli import main\nfrom .. import cli\nfrom ..client import x\n",
        "trl_quant/x.py": "def f():\n    from .cli.train import main\n",
        "trl_quant/cli/x.py": "from . import train\nfrom ..cli.options import o\n",
        "benchmarks/study/x.py": "import trl_quant.cli.report\n",
        "notebooks/x.ipynb": "from trl_quant import cli\n",
        "examples/x.py": "from trl_quant.cli.train import main\nfrom trl_quant.cli.report import main\n",
        "tests/x.py": "from trl_quant.cli import main\n",
    }
    assert [line.partition(";")[0] for line in imports_of_cli(made_up)] == [
        "trl_quant/report/x.py:1 imports trl_quant.cli",
        "trl_quant/report/x.py:2 imports trl_quant.cli",
        "trl_quant/x.py:2 imports trl_quant.cli.train",
        "benchmarks/study/x.py:1 imports trl_quant.cli.report",
        "notebooks/x.ipynb:1 imports trl_quant.cli",
        "examples/x.py:2 imports trl_quant.cli.report",
    ]


def test_pure_rooms_import_little(sources):
    none(impure_imports(sources))
    made_up = {
        "trl_quant/formats/x.py": "import numpy, torch, math\nfrom . import fp8\nfrom ..models.norms import n\n",
        "trl_quant/storage/files.py": "import safetensors\ndef f():\n    import safetensors.torch, numpy\n",
        "trl_quant/corrections/x.py": "from trl_quant import formats\nfrom .base import check\n",
        "trl_quant/noise/x.py": "from ..models.norms import n\nfrom .gaussian import g\n",
        "trl_quant/precisions.py": "from .formats import FORMATS\nfrom .config import C\n",
        "trl_quant/layers/x.py": "from ..precisions import P\nfrom ..kernels import k\ndef f():\n"
        "    from ..kernels.quantize import q\n    from ..rollout import r\n",
        "trl_quant/trainer.py": "import numpy\n",
    }
    assert [line.partition(";")[0].removeprefix("trl_quant/") for line in impure_imports(made_up)] == [
        "formats/x.py:1 imports numpy",
        "formats/x.py:3 imports trl_quant.models.norms",
        "corrections/x.py:1 imports trl_quant.formats",
        "precisions.py:2 imports trl_quant.config",
        "layers/x.py:2 imports trl_quant.kernels",
        "layers/x.py:5 imports trl_quant.rollout",
    ]


def imported_modules(sources: Sources) -> dict[str, set[str]]:
    """The other modules that each module imports, also inside functions."""
    files = modules(sources)
    imported = {module: set() for module in files}
    for module, text in files.items():
        for name, _, _ in imports(module, text):
            top, *path = name.split(".")
            places = [
                ("/".join(path[:length]), end)
                for length in (len(path), len(path) - 1)
                for end in (".py", "/__init__.py")
            ]
            found = [(place + end).removeprefix("/") for place, end in places if top == PACKAGE]
            imported[module] |= {next((place for place in found if place in files), module)} - {module}
    return imported


def in_circles(imported: dict[str, set[str]]) -> Violations:
    """Names those that import each other, directly or through others."""

    def reached(start: str) -> set[str]:
        seen, rest = set(), [start]
        while rest:
            new = imported[rest.pop()] - seen
            seen |= new
            rest += new
        return seen

    reachable = {one: reached(one) for one in imported}
    together = {tuple(sorted(b for b in reachable[a] if a in reachable[b])) for a in imported if a in reachable[a]}
    return [f"these import each other: {', '.join(circle)}" for circle in sorted(together)]


def circles(sources: Sources) -> Violations:
    """Modules that import each other."""
    return in_circles(imported_modules(sources))


def circles_of_rooms(sources: Sources) -> Violations:
    """Rooms that import each other: folders of the package, and modules beside them. Its face imports all of them."""
    rooms: dict[str, set[str]] = {}
    for module, others in imported_modules(sources).items():
        room = module.partition("/")[0]
        rooms.setdefault(room, set()).update({other.partition("/")[0] for other in others} - {room, "__init__.py"})
    return in_circles({room: others for room, others in rooms.items() if room != "__init__.py"})


def test_no_circles(sources):
    none(circles(sources))
    made_up = {
        "trl_quant/__init__.py": "",
        "trl_quant/a/__init__.py": "from .x import f\n",
        "trl_quant/a/x.py": "def f():\n    from . import y\n",
        "trl_quant/a/y.py": "import trl_quant.a.x\nfrom ..b import g\n",
        "trl_quant/b.py": "from .c import z\n",
        "trl_quant/c.py": "from trl_quant import b\n",
        "trl_quant/d.py": "from .a.x import f\nfrom .d import g\nimport torch\n",
    }
    assert circles(made_up) == [
        "these import each other: a/x.py, a/y.py",
        "these import each other: b.py, c.py",
    ]


def test_no_circles_of_rooms(sources):
    none(circles_of_rooms(sources))
    made_up = {
        "trl_quant/__init__.py": "from .a.x import f\n",
        "trl_quant/a/__init__.py": "",
        "trl_quant/a/x.py": "from ..b.y import g\n",
        "trl_quant/a/z.py": "from .x import f\nfrom ..d import h\n",
        "trl_quant/b/y.py": "",
        "trl_quant/b/w.py": "def f():\n    from ..c import k\n",
        "trl_quant/c.py": "from .a import z\n",
        "trl_quant/d.py": "from . import __version__\n",
    }
    assert circles(made_up) == []
    assert circles_of_rooms(made_up) == ["these import each other: a, b, c.py"]


def test_rules_are_of_files_that_exist(sources):
    """A rule on a room that was renamed guards nothing."""
    rooms = [pattern for _, allowed in [*PURE.values(), *LAZY.values()] for pattern in allowed]
    patterns = [*PURE, *LAZY, *LISTS_OF_PRECISIONS, *rooms, *(p for allowed in RESTRICTED.values() for p in allowed)]
    none(sorted({p for p in patterns if not any(matches(module, [p]) for module in modules(sources))}))


# Private names


def is_private(name: str) -> bool:
    return name.startswith("_") and name.strip("_") != "" and not (name.startswith("__") and name.endswith("__"))


def private_uses(text: str) -> Iterator[tuple[str, int, str]]:
    """`(name, line, code)` of each private name that is imported or is an attribute, also by `getattr` and its like."""
    for node in nodes(text):
        names = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            dotted = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            names = [part for name in dotted for part in name.split(".")]
        elif called(node) in ("getattr", "setattr", "hasattr", "delattr"):
            names = [part for string in strings(node.args[:2]) for part in string.split(".")]
        for name in names:
            if is_private(name):
                yield name, node.lineno, ast.unparse(node)


def defined_names(nodes) -> set[str]:
    """What is defined at some of the nodes: functions, classes, variables, attributes of `self`, names after `as`."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                names.add(node.attr)
        elif isinstance(node, ast.alias) and node.asname:
            names.add(node.asname)
    return names


def foreign_libraries(foreign: dict[str, str]) -> dict[str, str]:
    """Private name of another library -> its top-level package."""
    return {name: file.partition("/")[0] for file, names in foreign.items() for name in names.split()}


def crossing_names(sources: Sources, foreign: dict[str, str]) -> Violations:
    known = foreign_libraries(foreign)
    return [
        f"{path}:{line} uses {name}, which is private to another file: {code.splitlines()[0][:80]}"
        for path, text in sources.items()
        for name, line, code in sorted(private_uses(text), key=lambda use: use[1])
        if name not in known and name not in defined_names(nodes(text))
    ]


def inherited_libraries(sources: Sources) -> dict[str, set[str]]:
    """
    Class of the package -> top-level packages of the classes that it inherits from, also through others of ours. A
    mixin, which stands before a class of a library among the bases of another, has that one's library too, and so have
    the mixin's own bases.
    """
    bases, libraries, mixed_with = {}, {}, {}
    for text in modules(sources).values():
        origin = {}  # name in the file -> top-level package
        for node in nodes(text):
            if isinstance(node, ast.ImportFrom) and not node.level:
                origin |= {alias.asname or alias.name: node.module.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.Import):
                tops = [alias.name.partition(".")[0] for alias in node.names]
                origin |= {alias.asname or top: top for alias, top in zip(node.names, tops, strict=True)}
        for node in nodes(text):
            if isinstance(node, ast.ClassDef):
                names = [ast.unparse(base).partition("[")[0].split(".") for base in node.bases]
                bases[node.name] = [name[-1] for name in names]
                libraries[node.name] = {origin[name[0]] for name in names if name[0] in origin}
                for position, name in enumerate(names):
                    after = {origin[other[0]] for other in names[position + 1 :] if other[0] in origin}
                    mixed_with.setdefault(name[-1], set()).update(after)

    def spread(mixin: str, found: set[str]) -> None:
        for base in bases.get(mixin, ()):
            mixed_with.setdefault(base, set()).update(found)
            spread(base, found)

    for mixin, found in [*mixed_with.items()]:
        spread(mixin, found)

    def inherited(name: str) -> set[str]:
        own = libraries.get(name, set()) | mixed_with.get(name, set())
        return own.union(*(inherited(base) for base in bases.get(name, ()) if base != name))

    return {name: inherited(name) | ({"transformers"} if "trl" in inherited(name) else set()) for name in bases}


def own_names_called_foreign(sources: Sources, foreign: dict[str, str]) -> Violations:
    """Names in `foreign` that the package defines, other than in a class that inherits from their library."""
    library, inherited = foreign_libraries(foreign), inherited_libraries(sources)
    return [
        f"{PACKAGE}/{module}:{statement.lineno} defines {name}, which is said to be {library[name]}'s"
        for module, text in modules(sources).items()
        for statement in parsed(text).body
        for name in sorted(defined_names(ast.walk(statement)) & library.keys())
        if not (isinstance(statement, ast.ClassDef) and library[name] in inherited[statement.name])
    ]


def stale_foreign_names(sources: Sources, foreign: dict[str, str]) -> Violations:
    """Names in `foreign` that nothing uses or overrides, or that their libraries no longer have."""
    used = {name for text in sources.values() for name, _, _ in private_uses(text)}
    used |= {name for text in modules(sources).values() for name in defined_names(nodes(text))}
    found = []
    for file, names in foreign.items():
        found += [f"{name} of {file} is not used" for name in names.split() if name not in used]
        spec = importlib.util.find_spec(file.partition("/")[0]) if "/" in file else ast.__spec__  # imports nothing
        if spec is not None:
            path = Path(spec.origin).parents["/" in file] / file
            words = set(re.findall(r"\w+", f"{file} {path.read_text()}" if path.is_file() else ""))
            found += [f"{file} has no {name}" for name in names.split() if name not in words]
    return found


def test_private_names_stay_in_their_files(sources):
    none(crossing_names(sources, FOREIGN))
    made_up = {
        "trl_quant/a.py": "from .b import C, _d\nfrom ._e import f\nclass A(C):\n    def g(self):\n"
        "        self._own = self.h._own + self._of_c\n        return __name__ + getattr(self, '_by_name')\n",
        "trl_quant/b.py": "class C:\n    _of_c = _d = 1\n    def g(self):\n        return self._of_c, self.__dict__\n",
        "tests/x.py": "import torch._dynamo\nmonkeypatch.setattr(a, '_own', 1)\nmonkeypatch.setattr('a.b._c', 1)\n",
    }
    found = [line.partition(",")[0] for line in crossing_names(made_up, {"torch/_dynamo/__init__.py": "_dynamo"})]
    assert found == [
        "trl_quant/a.py:1 uses _d",
        "trl_quant/a.py:2 uses _e",
        "trl_quant/a.py:5 uses _of_c",
        "trl_quant/a.py:6 uses _by_name",
        "tests/x.py:2 uses _own",
        "tests/x.py:3 uses _c",
    ]


def test_foreign_names_are_foreign(sources):
    """They exist in their libraries, are used here, and are not ours, except where a class of ours overrides them."""
    none(own_names_called_foreign(sources, FOREIGN))
    none(stale_foreign_names(sources, FOREIGN))
    names = {"os.py": "_exit _gone", "trl/trainer/grpo_trainer.py": "_generate _metrics _helper"}
    made_up = {
        "trl_quant/a.py": "import trl.trainer as t\nclass A(t.Base):\n    def _generate(self):\n        self._gone()\n",
        "trl_quant/b.py": "from .a import A\nclass B(A):\n    def __init__(self):\n        self._metrics = 1\n"
        "class C:\n    def _generate(self): ...\ndef _helper(): ...\n",
        "trl_quant/c.py": "import trl.trainer as t\nclass Below:\n    def _generate(self): ...\nclass Mixin(Below):\n"
        "    def _generate(self): ...\nclass Last:\n    def _generate(self): ...\nclass D(Mixin, t.Base, Last): ...\n",
    }
    assert own_names_called_foreign(made_up, names) == [
        "trl_quant/b.py:5 defines _generate, which is said to be trl's",
        "trl_quant/b.py:7 defines _helper, which is said to be trl's",
        "trl_quant/c.py:6 defines _generate, which is said to be trl's",
    ]
    assert stale_foreign_names(made_up, names) == [
        "_exit of os.py is not used",
        "os.py has no _gone",
        "trl/trainer/grpo_trainer.py has no _helper",
    ]


# Precisions


def precisions(sources: Sources) -> set[str]:
    """The entries of the table."""
    tables = [node for node in parsed(sources[f"{PACKAGE}/precisions.py"]).body if isinstance(node, ast.AnnAssign)]
    (table,) = [node.value for node in tables if ast.unparse(node.target) == "PRECISIONS"]
    return set(strings(table.keys))


def lists_of_precisions(sources: Sources, names: set[str]) -> Violations:
    found = []
    for module, text in modules(sources).items():
        for node in nodes(text):
            words = []
            if isinstance(node, ast.List | ast.Tuple | ast.Set):
                words = strings(node.elts)
            elif isinstance(node, ast.Dict):
                words = strings([*node.keys, *node.values])
            elif called(node) == "dict":
                words = [keyword.arg for keyword in node.keywords]
            elif called(node) == "split":
                words = [word for string in strings([getattr(node.func, "value", None)]) for word in string.split()]
            listed = sorted(names & set(words))
            if len(listed) > 2 and not matches(module, LISTS_OF_PRECISIONS):
                found.append(f"{PACKAGE}/{module}:{node.lineno} lists {', '.join(listed)}")
    return found


def test_one_table_of_precisions(sources):
    """A new precision is one entry there: a list of them elsewhere is a second one, or a trait that has no name."""
    names = precisions(sources)
    assert {"bf16", "fp8", "int8"} < names
    none(lists_of_precisions(sources, names))
    listing = """A = {"bf16": 1, "fp8": {"int8": 2}, **B}
C = {1: "bf16", 2: "fp8", 3: "int8"}
if x in ("nf4", "int4", "nvfp4", y): ...
D = dict(bf16=1, fp8=2, int8=3), "bf16 fp8 mxfp4".split()
"""
    made_up = dict.fromkeys(("trl_quant/config.py", "trl_quant/formats/x.py", "tests/x.py"), listing)
    assert lists_of_precisions(made_up, names) == [
        "trl_quant/config.py:2 lists bf16, fp8, int8",
        "trl_quant/config.py:3 lists int4, nf4, nvfp4",
        "trl_quant/config.py:4 lists bf16, fp8, int8",
        "trl_quant/config.py:4 lists bf16, fp8, mxfp4",
    ]


# Exchanges of names of other libraries

INDICES = ("trl_seams.py", "rollout/vllm/seams.py")
# Calls that register something of ours with torch, or in a module of ours
OWN_REGISTRATIONS = {"register_buffer", "register_parameter", "register_fake"}
# Attributes of other libraries' objects that are there to be set
SETTINGS = """__doc__ atexit caption daemon data dps execute_model_state finish_reason generation_config
    init_lora_weights logprobs max_completion_length model_init_kwargs name_or_path new_logprobs new_token_ids
    num_input_tokens_seen stop_reason text training"""
# Exchanges that end in the function that makes them
ENDING = {
    ("rollout/verify/activations.py", "register_forward_hook"),
    ("rollout/verify/activations.py", "register_forward_pre_hook"),
    ("rollout/verify/kv_cache.py", "ALL_ATTENTION_FUNCTIONS"),
    ("rollout/verify/self_check.py", "_forward_hooks"),
    ("rollout/verify/self_check.py", "_forward_pre_hooks"),
    ("rollout/verify/self_check.py", "forward"),
    ("rollout/verify/copy_check.py", "register_forward_hook"),
    ("rollout/verify/self_check.py", "register_forward_hook"),
    ("rollout/vllm/activations.py", "register_forward_hook"),
    ("rollout/vllm/worker.py", "load_weights"),
    ("trainers/value_head.py", "register_forward_hook"),
    ("storage/perplexity.py", "register_forward_pre_hook"),  # on a model that is thrown away after it
}
NOT_HOSTS = ("cli/...", "report/...")  # whose objects are parsers, tables and figures

# Methods that write into a table. Tables of the standard library, such as `os.environ`, are a process's own.
WRITES = {"update", "setdefault", "pop", "popitem", "clear", "append", "extend", "insert", "remove"}

Patch = tuple[str, str]  # file of the package, name


def own_attributes(sources: Sources) -> set[str]:
    """Attributes that a class of the package defines, or sets on `self`."""
    names = set()
    for text in modules(sources).values():
        for node in nodes(text):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    names.add(node.attr)
            elif isinstance(node, ast.ClassDef):
                names |= {part.target.id for part in node.body if isinstance(part, ast.AnnAssign)}
                assigned = [target for part in node.body if isinstance(part, ast.Assign) for target in part.targets]
                names |= {target.id for target in assigned if isinstance(target, ast.Name)}
    return names


def imported_from_hosts(text: str) -> set[str]:
    """Names that a file imports from other libraries than the standard one."""
    imports = [node for node in nodes(text) if isinstance(node, ast.ImportFrom) and not node.level]
    foreign = [node for node in imports if node.module.partition(".")[0] not in sys.stdlib_module_names]
    return {alias.asname or alias.name for node in foreign for alias in node.names}


def written_table(node: ast.AST) -> str | None:
    """The last name of the table that a node writes into, as in `TABLE[x] = y`, `del a.TABLE[x]`, `TABLE.update(z)`."""
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        table = node.value
    elif called(node) in WRITES and isinstance(node.func, ast.Attribute):
        table = node.func.value
    else:
        return None
    return getattr(table, "attr", getattr(table, "id", None))


def exchanges(sources: Sources) -> Iterator[tuple[Patch, int]]:
    """What the package sets on objects of other libraries, or registers with those, and the lines."""
    own = own_attributes(sources) - {"forward"} | set(SETTINGS.split())
    for module, text in modules(sources).items():
        if matches(module, NOT_HOSTS):
            continue
        imported = imported_from_hosts(text)
        for node in nodes(text):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                is_ours = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "ctx")
                if not is_ours and node.attr not in own:
                    yield (module, node.attr), node.lineno
            table = written_table(node)
            if table in imported:
                yield (module, table), node.lineno
            name = called(node) or ""
            if name == "setattr" and isinstance(node.args[1], ast.Constant) and node.args[1].value not in own:
                yield (module, node.args[1].value), node.lineno
            is_registration = name.lstrip("_").startswith("register") or name == "set_weight_attrs"
            if is_registration and name not in OWN_REGISTRATIONS:
                yield (module, name), node.lineno


def indexed(sources: Sources) -> dict[Patch, tuple[str, str, str]]:
    """The rows of the indices: file and name, and whose it is, how long it lasts, the test that needs it."""
    rows = {}
    for index in INDICES:
        for statement in parsed(sources[f"{PACKAGE}/{index}"]).body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]).startswith("LASTING"):
                rows |= ast.literal_eval(statement.value)
    return rows


def patches_without_a_row(sources: Sources) -> Violations:
    rows = indexed(sources)
    return [
        f"{PACKAGE}/{module}:{line} exchanges {name}, which no index has"
        for (module, name), line in exchanges(sources)
        if (module, name) not in rows and (module, name) not in ENDING
    ]


def stale_rows(sources: Sources) -> Violations:
    """Rows of what is exchanged no more, or whose test is not there."""
    found = {patch for patch, _ in exchanges(sources)}
    stale = [
        f"{module} does not exchange {name}" for module, name in sorted((indexed(sources).keys() | ENDING) - found)
    ]
    for (module, name), (_, _, test) in indexed(sources).items():
        path, _, function = test.partition("::")
        if f"def {function}(" not in sources.get(path, ""):
            stale.append(f"{module}, {name}: there is no {test}")
    return stale


def test_every_lasting_exchange_stands_in_the_index(sources, monkeypatch):
    none(patches_without_a_row(sources))
    none(stale_rows(sources))
    monkeypatch.setitem(globals(), "ENDING", {("d.py", "forward"), ("d.py", "gone")})
    made_up = {
        "trl_quant/trl_seams.py": "LASTING = {('a.py', 'forward'): ('x', 'y', 'tests/x.py::test_f'),\n"
        "('a.py', 'old'): ('x', 'y', 'tests/x.py::test_g')}\n",
        "trl_quant/rollout/vllm/seams.py": "LASTING = {('a.py', 'register_loader'): "
        "('x', 'y', 'tests/x.py::test_f')}\n",
        "trl_quant/a.py": "class A:\n    size: int = 1\n    def f(self, m):\n        self.n = m.size = m.n = 2\n"
        "        m.forward = m.data = f\n@register_loader('x')\ndef g(m): m.other, m.register_buffer('b')\n",
        "trl_quant/b.py": "import trl\ntrl.GRPOTrainer._generate = lambda self: 1\nTable.register('x', f)\n"
        "m.__class__ = A\nsetattr(m, 'forward', f), setattr(m, name, f), setattr(m, 'size', 1)\n",
        "trl_quant/d.py": "def f(m): m.forward, m.left = 1, 2\n",
        "trl_quant/e.py": "import os\nfrom transformers.x import TABLE, NAMES\nfrom .b import OWN\n"
        "TABLE['sdpa'] = NAMES['a'], OWN.update(x=1), os.environ.pop('b')\nOWN['a'] = 1\n"
        "NAMES.update(b=TABLE.get('c'))\n",
        "tests/x.py": "def test_f(tmp_path): ...\n",
    }
    assert patches_without_a_row(made_up) == [
        "trl_quant/b.py:2 exchanges _generate, which no index has",
        "trl_quant/b.py:3 exchanges register, which no index has",
        "trl_quant/b.py:4 exchanges __class__, which no index has",
        "trl_quant/b.py:5 exchanges forward, which no index has",
        "trl_quant/d.py:1 exchanges left, which no index has",
        "trl_quant/e.py:4 exchanges TABLE, which no index has",
        "trl_quant/e.py:6 exchanges NAMES, which no index has",
    ]
    assert stale_rows(made_up) == [
        "a.py does not exchange old",
        "d.py does not exchange gone",
        "a.py, old: there is no tests/x.py::test_g",
    ]


# Corrections

AMBIGUOUS = {"none", "trl"}  # also names of other things, so they count where a correction is compared


def comparisons_with_names(sources: Sources, names: set[str]) -> Violations:
    """Comparisons with one of some `names`, other than of a command's own options."""
    found = []
    for module, text in modules(sources).items():
        for node in nodes(text):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                parts = [part for side in sides for part in [side, *getattr(side, "elts", [])]]
                is_of_corrections = "correction" in ast.unparse(node)
            elif isinstance(node, ast.Match):
                parts = [part.value for case in node.cases for part in ast.walk(case.pattern) if hasattr(part, "value")]
                is_of_corrections = "correction" in ast.unparse(node.subject)
            else:
                continue
            if is_of_corrections and names & set(strings(parts)):
                code = ast.unparse(node).splitlines()[0]
                found.append(f"{PACKAGE}/{module}:{node.lineno} compares a correction's name: {code}")
    return found


def test_corrections_are_asked_for_their_traits(sources):
    tables = [node for node in nodes(sources[f"{PACKAGE}/corrections/__init__.py"]) if isinstance(node, ast.Dict)]
    names = {name for table in tables for name in strings(table.keys)}
    assert {"trl", "none", "acr"} < names
    none(comparisons_with_names(sources, names))
    none(compared_names(sources, names - AMBIGUOUS, ("corrections/...",)))
    made_up = {
        "trl_quant/x.py": "if args.is_correction == 'trl' or args.is_correction in ('none', x): ...\n"
        "a = correction != 'acr'\nb = args.format == 'none'\nc = CORRECTIONS['tis'], args.is_correction == name\n"
        "match args.is_correction:\n    case 'acr' | 'trl': ...\nmatch args.format:\n    case 'none': ...\n",
    }
    assert [line.partition(" compares ")[0] for line in comparisons_with_names(made_up, names)] == [
        "trl_quant/x.py:5",
        "trl_quant/x.py:2",
        "trl_quant/x.py:1",
        "trl_quant/x.py:1",
    ]
    made_up = dict.fromkeys(("trl_quant/config.py", "trl_quant/corrections/x.py"), "if name in ('none', 'tis'): ...\n")
    found = compared_names(made_up, names - AMBIGUOUS, ("corrections/...",))
    assert found == ["trl_quant/config.py:1 compares with tis"]


def compared_names(sources: Sources, names: set[str], rooms: tuple[str, ...] = LISTS_OF_PRECISIONS) -> Violations:
    """Comparisons with one of the `names`, outside the rooms that have a file or a kernel for each of them."""
    found = []
    for module, text in modules(sources).items():
        for node in nodes(text):
            sides = []
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
            elif isinstance(node, ast.MatchValue):
                sides = [node.value]
            sides += [part for side in sides if isinstance(side, ast.List | ast.Tuple | ast.Set) for part in side.elts]
            compared = sorted(names & set(strings(sides)))
            if compared and not matches(module, rooms):
                found.append(f"{PACKAGE}/{module}:{node.lineno} compares with {', '.join(compared)}")
    return found


def test_formats_are_asked_for_their_traits(sources):
    """A format or a precision that is compared by its name has a trait without one."""
    names = set(FORMATS)
    none(compared_names(sources, names))
    comparing = """if x == "fp8": ...
if "int8" != x or y in ("nf4", z): ...
if x in FORMATS and y == "bf16": ...
match x:
    case "mxfp4": ...
"""
    made_up = dict.fromkeys(("trl_quant/config.py", "trl_quant/formats/x.py", "tests/x.py"), comparing)
    assert compared_names(made_up, names) == [
        "trl_quant/config.py:1 compares with fp8",
        "trl_quant/config.py:2 compares with int8",
        "trl_quant/config.py:2 compares with nf4",
        "trl_quant/config.py:5 compares with mxfp4",
    ]


# Names


def names_of_two_things(sources: Sources) -> Violations:
    """Constants and tables of one name that are defined in two rooms."""
    rooms: dict[str, set[str]] = {}
    for module, text in modules(sources).items():
        room = PurePosixPath(module).parent.as_posix()
        for node in parsed(text).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                for name in ast.walk(target) if target is not None else ():
                    if isinstance(name, ast.Name) and name.id.isupper() and not is_private(name.id):
                        rooms.setdefault(name.id, set()).add(module if room == "." else room)
    return [
        f"{name} stands in {' and '.join(sorted(found))}" for name, found in sorted(rooms.items()) if len(found) > 1
    ]


def test_one_name_is_one_thing(sources):
    none(names_of_two_things(sources))
    made_up = {
        "trl_quant/a/x.py": "FORMATS = {}\nBLOCK: int = 1\n_OWN = LOW, HIGH = 1, 2\nother = 1\n",
        "trl_quant/a/y.py": "BLOCK = 2\nfor LOOP in (): ...\n",
        "trl_quant/a/b/x.py": "FORMATS: dict = {}\n_OWN = other = 1\ndef f():\n    BLOCK = 1\n",
        "trl_quant/c.py": "from .a.x import FORMATS\nHIGH = 3\n",
        "tests/x.py": "BLOCK = 1\n",
    }
    assert names_of_two_things(made_up) == [
        "FORMATS stands in a and a/b",
        "HIGH stands in a and c.py",
    ]


# Quantized layers

LAYER_NAMES = re.compile(r"(?<![a-z_])([qkvo]_proj|(gate|up|down|qkv|gate_up)_proj|experts|lm_head)(?![a-z_])")
# Where layers may be named: the map of models, and what asks vLLM for the head of its own model
NAMING_LAYERS = ("models/...", "rollout/vllm/worker.py", "rollout/vllm/engine.py")
# Where layers may be told apart by `nn.Linear`: the map, and what checks that a saved adapter adapts nothing else
PICKING_LAYERS = ("models/...", "storage/adapter.py")
WALKS = {"modules", "named_modules", "children", "named_children"}


def named_layers(sources: Sources) -> Violations:
    """Literals with the name of a linear layer in them, apart from docstrings and messages, which have spaces."""
    found = []
    for module, text in modules(sources).items():
        if matches(module, NAMING_LAYERS):
            continue
        docstrings = {node.value for node in nodes(text) if isinstance(node, ast.Expr)}
        for node in nodes(text):
            for literal in strings([node]):
                name = None if node in docstrings or re.search(r"\s", literal) else LAYER_NAMES.search(literal)
                if name is not None:
                    found.append(f"{PACKAGE}/{module}:{node.lineno} names {name[0]}; ask models/linears.py")
    return found


def picked_layers(sources: Sources) -> Violations:
    """Loops over the modules of a model that ask which of them are `nn.Linear`."""
    found = []
    for module, text in modules(sources).items():
        if matches(module, PICKING_LAYERS):
            continue
        for node in nodes(text):
            loops = [node] if isinstance(node, ast.For) else getattr(node, "generators", [])
            walks = [loop for loop in loops if {called(part) for part in ast.walk(loop.iter)} & WALKS]
            walked = {part.id for loop in walks for part in ast.walk(loop.target) if isinstance(part, ast.Name)}
            for part in ast.walk(node) if walked else ():
                if asks_for_linear(part, walked):
                    found.append(f"{PACKAGE}/{module}:{part.lineno} picks linear layers; ask models/linears.py")
    return found


def asks_for_linear(node: ast.AST, names: set[str]) -> bool:
    """Whether a node is `isinstance(x, nn.Linear)` or `type(x) is nn.Linear`, where `x` has to do with `names`."""
    if called(node) == "isinstance":
        asked, kinds = node.args
    elif isinstance(node, ast.Compare) and called(node.left) == "type":
        asked, kinds = node.left.args[0], node.comparators[0]
    else:
        return False
    linear = any(getattr(part, "attr", getattr(part, "id", None)) == "Linear" for part in ast.walk(kinds))
    return linear and any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(asked))


def test_models_decide_what_is_quantized(sources):
    none(named_layers(sources))
    none(picked_layers(sources))
    choosing = """\"\"\"Such as q_proj.\"\"\"
FUSED = (("q_proj", "k_proj"),)
if ".experts." in name or name == "lm_head" or re.match(r"(.*\\.)?gate_up_proj$", name): ...
raise ValueError("the model has no lm_head")
print("experts_per_token", "down_projection", model.layers[0].mlp.up_proj)
"""
    picking = """for name, module in list(model.named_modules()):
    if isinstance(module, torch.nn.Linear): ...
    if isinstance(base_layer(module), nn.Linear) or isinstance(module, FrozenLinear): ...
layers = [m for m in decoder.modules() if type(m) is Linear and isinstance(model, nn.Linear)]
count = sum(isinstance(m, (nn.Linear, Conv1D)) for m in decoder.modules())
kinds = [isinstance(layer, nn.Linear) for layer in layers]
"""
    paths = ("trl_quant/policy/x.py", "trl_quant/models/x.py", "tests/x.py")
    assert [line.partition(";")[0] for line in named_layers(dict.fromkeys(paths, choosing))] == [
        "trl_quant/policy/x.py:2 names q_proj",
        "trl_quant/policy/x.py:2 names k_proj",
        "trl_quant/policy/x.py:3 names experts",
        "trl_quant/policy/x.py:3 names lm_head",
        "trl_quant/policy/x.py:3 names gate_up_proj",
    ]
    assert [line.partition(";")[0] for line in picked_layers(dict.fromkeys(paths, picking))] == [
        "trl_quant/policy/x.py:2 picks linear layers",
        "trl_quant/policy/x.py:3 picks linear layers",
        "trl_quant/policy/x.py:4 picks linear layers",
        "trl_quant/policy/x.py:5 picks linear layers",
    ]


# Texts


def undocumented(sources: Sources) -> Violations:
    return [path for path, text in sources.items() if not (ast.get_docstring(parsed(text)) or "").strip()]


def too_long(sources: Sources) -> Violations:
    lengths = {path: len(text.splitlines()) for path, text in sources.items() if not path.startswith("tests/")}
    return [f"{path} has {n} lines, more than {MAX_LINES}" for path, n in lengths.items() if n > MAX_LINES]


def texts_that_lean_on_others(texts: Sources) -> Violations:
    """Paths of one machine, numbers of issues, documents that the repository lacks, what is unfinished."""
    found = []
    for path, text in texts.items():
        words = re.findall(r"/(?:work|home|root|mnt)/\w+|\bissues? #?\d+|#\d+\b|\b(?:TODO|FIXME|XXX|HACK)\b", text)
        words += [name for name in re.findall(r"\b[A-Z]{3,}\.md\b", text) if not (ROOT / name).is_file()]
        found += [f"{path} mentions {word}" for word in words]
    return found


def test_every_source_says_what_it_is(sources):
    none([f"{path} has no docstring" for path in undocumented(sources)])
    assert undocumented({"a.py": "x = 1\n", "b.py": '""""""\n', "c.py": '"""What it is."""\n'}) == ["a.py", "b.py"]


def test_no_long_sources(sources):
    none(too_long(sources))
    lengths = {"trl_quant/a.py": 501, "examples/b.py": 500, "tests/c.py": 501}
    made_up = {path: "x = 1\n" * length for path, length in lengths.items()}
    assert too_long(made_up) == ["trl_quant/a.py has 501 lines, more than 500"]


def test_texts_stand_alone(sources):
    others = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "Makefile", ROOT / "setup.cfg"]
    texts = sources | {path.relative_to(ROOT).as_posix(): path.read_text() for path in others}
    del texts["tests/pages/test_house_rules.py"]  # which names what it forbids
    none(texts_that_lean_on_others(texts))
    made_up = {"a.py": "see /home/me/x, issue 12 and PLAN.md\n", "b.py": "# TODO: #7\n", "c.md": "CONTRIBUTING.md\n"}
    found = [line.partition(" mentions ")[2] for line in texts_that_lean_on_others(made_up)]
    assert found == ["/home/me", "issue 12", "PLAN.md", "TODO", "#7"]
