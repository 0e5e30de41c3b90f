"""The rules of CONTRIBUTING.md that can be read from the sources: who imports what, and what is exchanged for good.

A rule is a function from sources to violations. Each test shows that ours have none, and that the rule finds those of
made-up sources.
"""

import ast
import json
import sys
from collections.abc import Iterator

from places import ROOT
from sources import (
    LISTS_OF_PRECISIONS,
    PACKAGE,
    Sources,
    Violations,
    called,
    imports,
    matches,
    modules,
    nodes,
    none,
    parsed,
)


# Who may import what not everyone may; `...` stands for any file
RESTRICTED = {
    "trl": (
        *("trainers/...", "config/...", "trl_seams.py", "cli/..."),
        *("rollout/trl_face.py", "rollout/vllm/client.py"),
    ),
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

# Imports


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
        "trl_quant/rollout/vllm/client.py": "import trl, vllm\n",
        "trl_quant/rollout/trl_face.py": "import trl\n",
        "trl_quant/cli/x.py": "import triton\n",
        "tests/x.py": "import vllm\n",
    }
    assert [line.partition(";")[0] for line in restricted_imports(made_up)] == [
        "trl_quant/noise/x.py:1 imports vllm.lora",
        "trl_quant/noise/x.py:3 imports trl.core",
        "trl_quant/rollout/x.py:1 imports trl",
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


# Exchanges of names of other libraries

INDICES = ("trl_seams.py", "rollout/vllm/seams.py")
# Calls that register something of ours with torch, or in a module of ours
OWN_REGISTRATIONS = {"register_buffer", "register_parameter", "register_fake"}
# Attributes of other libraries' objects that are there to be set
SETTINGS = """__doc__ atexit caption daemon data dps execute_model_state finish_reason generation_config
    init_lora_weights logprobs max_completion_length model_init_kwargs name_or_path new_logprobs new_token_ids
    num_input_tokens_seen routed_experts sampling_mask stop_reason text training"""
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
    ("trainers/ppo/value_head.py", "register_forward_hook"),
    ("storage/perplexity.py", "register_forward_pre_hook"),  # on a model that is thrown away after it
    ("storage/perplexity.py", "register_forward_hook"),
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
