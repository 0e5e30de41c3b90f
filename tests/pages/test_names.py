"""Names: private ones stay in their files, those of other libraries are theirs, and one name is one thing."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from places import ROOT
from sources import (
    PACKAGE,
    Sources,
    Violations,
    called,
    is_private,
    modules,
    nodes,
    none,
    parsed,
    strings,
)


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
    "torch/cpu/__init__.py": "_is_amx_tile_supported _is_avx512_bf16_supported _is_avx512_supported",
    "torch/nn/modules/module.py": "_forward_hooks _forward_pre_hooks _modules _parameters",
    "torch/nn/parallel/distributed.py": "_ddp_params_and_buffers_to_ignore",
    "torch/utils/_python_dispatch.py": "_python_dispatch",
    "accelerate/commands/launch.py": "_validate_launch_command",
    "transformers/configuration_utils.py": "_attn_implementation _commit_hash",
    "transformers/core_model_loading.py": "_weight_conversions",
    "transformers/generation/utils.py": "_get_logits_processor",
    "transformers/modeling_utils.py": "_keys_to_ignore_on_load_unexpected _no_split_modules _supports_sdpa",
    "transformers/training_args.py": "_VALID_DICT_FIELDS",
    "transformers/trainer.py": """_get_grad_norm _get_output_dir _load_best_model _load_from_checkpoint
        _load_optimizer_and_scheduler _load_rng_state _save_checkpoint _save_optimizer_and_scheduler
        _train_batch_size""",
    "peft/tuners/lora/config.py": "_register_custom_module",
    "peft/tuners/tuners_utils.py": "_cast_input_dtype",
    "trl/trainer/grpo_trainer.py": """_compute_loss _generate _generate_and_score_completions _generate_single_turn
        _get_per_token_logps_and_entropies _get_train_sampler _last_loaded_step _calculate_rewards _logs _metrics
        _last_world_entropy _pending_extra_logs _pending_metrics _step _tag_names _tool_call_loop _tokenize_prompts""",
    "trl/experimental/async_grpo/async_grpo_trainer.py": """_epoch_stop_groups _groups_before_resume
        _rollout_dataset _sync_weight _trained_groups""",
    "trl/experimental/async_grpo/async_rollout_worker.py": """_AsyncRolloutLoop _chain_to_sequences
        _env_reward_types _env_tools _environment_pool _generate_one _generate_one_turn _loop _multi_environment
        _push_metrics _standalone_tools _tool_pool""",
    "trl/trainer/distillation_trainer.py": "_get_last_hidden_state",
    "trl/kernels/chunked_logprob.py": "_addmm_fp32 _use_triton",
    "trl/generation/vllm_generation.py": "_init_vllm",
    "trl/generation/vllm_client.py": "_post",
    "vllm/_custom_ops.py": "_C _custom_ops",
    "vllm/distributed/parallel_state.py": "_EP",
    "vllm/model_executor/layers/attention/attention.py": """_k_scale _k_scale_float _q_scale _q_scale_float _v_scale
        _v_scale_float""",
    "vllm/model_executor/kernels/linear/__init__.py": "_POSSIBLE_INT8_KERNELS",
    "vllm/model_executor/layers/rotary_embedding/__init__.py": "_ROPE_DICT",
    "vllm/model_executor/models/registry.py": "_run_in_subprocess",
}


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


# Constants


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


def test_files_that_tests_import_by_name_have_one_name_each():
    """Examples, benchmarks and helpers are found by their names alone, and which comes first differs between runs."""
    folders = ("examples", "benchmarks", "benchmarks/study", "tests/helpers")
    found = [file.name for folder in folders for file in (ROOT / folder).glob("*.py") if file.name != "__init__.py"]
    assert sorted(found) == sorted(set(found)) and "training.py" in found
