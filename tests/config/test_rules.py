"""
Each rule of what may not go together, broken once by a real config, and the page that is made from the rules.

A config is built with the rule under test alone, so that a case cannot pass because of another rule.
"""

from dataclasses import fields, replace
from itertools import combinations, product

import pytest
from places import ROOT
from rule_cases import CASES
from rule_runs import (
    ASYNC,
    BF16_VLLM,
    DIFFUSION,
    DISTILLATION,
    EAGLE,
    GRPO,
    INT8,
    LORA,
    MASK,
    PPO,
    RLOO,
    VLLM,
    build,
    from_disk,
    tiny,
)
from tiny import tiny_tokenizer

from trl_quant.config.checks import RULES, check_what
from trl_quant.config.checks.rule import NEEDS, Rule
from trl_quant.config.given import Given
from trl_quant.config.pairs import IDEAS, PAIR_RULES, against, broken, markdown, runs_with


ALL = [(idea, number) for idea, rules in RULES.items() for number in range(len(rules))]


def test_each_rule_has_a_case():
    assert {idea: len(cases) for idea, cases in CASES.items()} == {idea: len(rules) for idea, rules in RULES.items()}


@pytest.mark.parametrize(("idea", "number"), ALL)
def test_a_real_config_breaks_it(idea, number, tmp_path, monkeypatch, caplog):
    rule, case = RULES[idea][number], CASES[idea][number]
    if case.needs_vllm:
        pytest.importorskip("vllm", reason="vLLM is not installed")
    for other in RULES:
        monkeypatch.setitem(RULES, other, (rule,) if other == idea and rule.needs == "fields" else ())
    if case.says.startswith("vLLM is not installed"):
        monkeypatch.setattr("trl_quant.rollout.vllm.support.is_vllm_available", lambda: False)
    if case.says.startswith("needs Liger"):
        monkeypatch.setattr("trl_quant.config.checks.machine.is_liger_kernel_available", lambda: False)
    if case.says.startswith("does not run in vLLM"):
        monkeypatch.setattr("trl_quant.rollout.vllm.support.supported_precisions", lambda: {"int8": "no kernel"})
    if case.says.startswith("another model"):
        case = replace(case, fields={**case.fields, "vllm_engine_kwargs": {"model": str(tmp_path / "model")}})
    if rule.needs == "fields" and rule.error is not None and not case.assigned:
        with pytest.raises(rule.error) as refused:
            build(case.config_class, **case.fields)
        message = str(refused.value)
    else:
        args = build(case.config_class, **case.fields)
        if rule.needs == "fields" and rule.error is None:
            assert case.says in caplog.text
        others = case.others(tmp_path) if callable(case.others) else case.others
        for name, value in case.assigned.items():
            setattr(args, name, value)
        message = rule.broken(Given(args, case.model(tmp_path) if case.model else None, others))
    assert message is not None and case.says in message, message


@pytest.mark.parametrize(
    ("drafts", "refused"),
    [
        (EAGLE, True),
        ({"method": "draft_model", "model": "a/draft"}, True),
        ({"model": "a/draft"}, True),
        ({"method": "mtp"}, True),
        ({"method": "ngram"}, False),
        ({"method": "suffix"}, False),
        ({"model": "[ngram]"}, False),
        (None, False),
    ],
)
def test_a_sleep_that_discards_a_model_that_drafts(drafts, refused):
    """By vLLM's method, or the model's name without one; a sleep of level 1 keeps the model."""
    (rule,) = (rule for rule in RULES["vllm"] if "model that drafts" in rule.message)
    given = VLLM | {"vllm_engine_kwargs": {"speculative_config": drafts}, "vllm_enable_sleep_mode": True}
    if refused:
        with pytest.raises(ValueError, match="Set `vllm_sleep_level=1`"):
            build(GRPO, **given)
    else:
        build(GRPO, **given)
    for kept in ({"vllm_sleep_level": 1}, {"vllm_enable_sleep_mode": False}):
        assert rule.broken(Given(build(GRPO, **given | kept), None, {})) is None


def test_known_kernels_of_experts_may_be_asked_for(tmp_path):
    (rule,) = (rule for rule in RULES["vllm"] if "`vllm_engine_kwargs`={args" in rule.message)
    given = [
        Given(build(GRPO, **BF16_VLLM, vllm_engine_kwargs=kwargs), tiny("qwen3_moe")(tmp_path), {})
        for kwargs in ({"moe_backend": "triton", "enable_eplb": False}, {"enable_eplb": True})
    ]
    assert [rule.broken(run) is None for run in given] == [True, False]


@pytest.mark.parametrize("config_class", [GRPO, RLOO, PPO, DISTILLATION, DIFFUSION, ASYNC])
def test_a_plain_run_breaks_none(config_class, tmp_path):
    policy = tiny(is_causal=False)(tmp_path) if config_class is DIFFUSION else from_disk(tmp_path)
    given = {"teacher_model": from_disk(tmp_path), "processing_class": tiny_tokenizer()}
    args = build(config_class, **({} if config_class is DIFFUSION else INT8), **MASK.get(config_class, {}))
    run = Given(args, policy, given)
    found = [rule.broken(run) for rules in RULES.values() for rule in rules if rule.error is not None]
    assert [message for message in found if message] == []


def test_a_rule_holds_only_for_configs_with_its_fields():
    rule = Rule(("gamma",), when=lambda run: run.args.gamma == 0.5, message="`gamma`={args.gamma}: {found}")
    broken_by = build(PPO, gamma=0.5)
    assert rule.broken(Given(broken_by)) == "`gamma`=0.5: True"
    assert rule.broken(Given(build(PPO))) is None and rule.broken(Given(build(GRPO))) is None
    assert {rule.needs for rules in RULES.values() for rule in rules} == set(NEEDS)


# What goes with what


def real(values: dict[str, str]) -> str | None:
    """Builds the config of these values as a user does, and returns what is said against it."""
    chosen = {name: value for idea in IDEAS for name, value in IDEAS[idea][values[idea]].items()}
    adapted = chosen.pop("is_adapted")
    config_class = chosen.pop("config_class")
    constants = {name: chosen.pop(name) for name in {*chosen} - {f.name for f in fields(config_class)}}
    try:
        args = build(config_class, **chosen)
        vars(args).update(constants)
        args.resolve_for(adapted=adapted)
        check_what("fields", Given(args))
        check_what("arguments", Given(args, "policy", LORA if adapted else {}))
    except ValueError as refused:
        return str(refused)
    return None


@pytest.mark.parametrize(("first", "second"), [pair for pair in combinations(IDEAS, 2) if "sharding" not in pair])
def test_a_cell_is_what_a_real_config_says(first, second):
    """The run that decides it, and the plainest one. Sharding needs processes: the rules read it from the config."""
    for row, column in product(IDEAS[first], IDEAS[second]):
        pair = {first: row, second: column}
        runs = list(runs_with(pair))
        allowed = [values for values in runs if broken(*values.items()) is None]
        assert (against(pair) is None) == bool(allowed)
        for values in (runs[0], *allowed[:1]):
            found, said = broken(*values.items()), real(values)
            assert (found is None) == (said is None), (values, found, said)


def test_what_the_tables_say():
    """Facts of the documents, in both directions."""
    nothing = {"trainer": "GRPO", "sharding": "DDP", "engine": "vLLM"}
    beside = "LoRA, `lora_sync='adapter'`"
    assert against({"trainer": "masked diffusion", "engine": "vLLM"}) and not against(nothing)
    assert against({"engine": "vLLM server", "adapter": beside}) and not against({"engine": "vLLM", "adapter": beside})
    assert against({"`rollout_precision`": "nf4", "engine": "vLLM"})
    assert not against({"`rollout_precision`": "nf4", "engine": "embedded"})
    assert against({"`train_precision`": "nf4", "sharding": "FSDP2"})
    assert not against({"`train_precision`": "nf4", "sharding": "ZeRO-2"})
    assert against({"trainer": "PPO", "sharding": "ZeRO-2"}) and not against({"trainer": "RLOO", "sharding": "ZeRO-3"})
    rule, message = against({"trainer": "RLOO", "sharding": "FSDP1"})
    assert PAIR_RULES[rule].fields == ("rollout_precision",) and "joins the weights" in message


@pytest.mark.slow
def test_the_page_is_made_from_the_rules():
    assert (ROOT / "docs/combinations.md").read_text() == markdown()
