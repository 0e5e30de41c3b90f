"""Routing replay in a policy: gradients are those of loops over tokens and experts with the replayed experts."""

import pytest
import torch
from packed_rows import PROMPT, batch, gradients
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from slow_routing import (
    ALL_GATES,
    GATES,
    blocks_of,
    chosen_again,
    compute_slowly,
    made_up_choices,
    mixture_of,
    slow_balance,
)
from tiny import MIXTURES, tiny_model
from torch.func import functional_call
from trl.trainer.utils import add_fused_lm_head

from trl_quant.layers.packed import Packed
from trl_quant.models.names import clean_name
from trl_quant.models.routers import gates, routers
from trl_quant.policy.packed import PackedRows, accept_packed_rows
from trl_quant.policy.routing import ROUTED, Routed, accept_routing, takes_routing


pytestmark = pytest.mark.isa
CHECKPOINTING = {"kept": None, "recomputed": {"use_reentrant": False}, "reentrant": {"use_reentrant": True}}


def replaying(family, **settings):
    model = mixture_of(family, **settings)
    add_fused_lm_head(model, temperature=0.9, outputs=("log_probs", "entropy"))
    accept_routing(model)
    return model.train()


def small_batch():
    """The first four rows, cut: left-padded prompts, two of them equal, and completions that end at other lengths."""
    return {name: values[:4, :24] for name, values in batch().items()}


def routed(given, model, replays=True, seed=0):
    experts = made_up_choices(given["input_ids"], given["attention_mask"], model.config.num_hidden_layers, seed=seed)
    return Routed(experts, replays)


def slow_gradients(family, settings, given, experts):
    model = mixture_of(family, **settings)
    add_fused_lm_head(model, temperature=0.9, outputs=("log_probs", "entropy"))
    compute_slowly(model, family, settings, experts)
    return gradients(model.train(), model, given)


def farthest(found, expected):
    """The largest relative distance of a parameter's gradient."""
    return max(
        ((found[2][name] - grad).norm() / grad.norm().clamp(min=1e-6)).item() for name, grad in expected[2].items()
    )


@pytest.mark.parametrize(("family", "settings"), ALL_GATES, ids=str)
def test_gradients_are_those_of_a_loop(family, settings):
    """In padded rows and in a packed one, with each layer kept or computed again in the backward pass."""
    given = small_batch()
    model = replaying(family, **settings)
    choices = routed(given, model)
    expected = slow_gradients(family, settings, given, choices.experts)
    own = gradients(model, model, given)
    assert farthest(own, expected) > 0.1
    routers_found = {name for name in expected[2] if name.endswith("mlp.gate.weight")}
    assert len(routers_found) == len(blocks_of(model)) and all(
        expected[2][name].norm() > 1e-3 for name in routers_found
    )
    for how in CHECKPOINTING.values():
        model.gradient_checkpointing_disable()
        if how is not None:
            model.gradient_checkpointing_enable(how)
        found = gradients(model, model, given | {ROUTED: choices})
        torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
        assert farthest(found, expected) < 1e-4
    accept_packed_rows(model)
    for shares in (False, True):
        found = gradients(model, PackedRows(model, PROMPT, shares), given | {ROUTED: choices})
        torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
        assert farthest(found, expected) < 1e-4


@pytest.mark.parametrize("family", MIXTURES)
def test_its_own_choice_changes_no_bit(family):
    """Nor do experts that are only compared, and a pass without routing computes as a model without hooks."""
    given = small_batch()
    plain = mixture_of(family)
    add_fused_lm_head(plain, temperature=0.9, outputs=("log_probs", "entropy"))
    expected = gradients(plain.train(), plain, given)
    model, seen = replaying(family), {}
    for number, block in blocks_of(model).items():
        block.gate.register_forward_hook(lambda _, args, output, number=number: seen.update({number: output[2]}))
    own = gradients(model, model, given)
    experts = torch.full((*given["input_ids"].shape, 2, 2), -1)
    for number, indices in seen.items():
        experts[:, :, number] = indices.view(experts[:, :, number].shape)
    for routing in (Routed(experts), routed(given, model, replays=False), None):
        again = gradients(model, model, given | ({} if routing is None else {ROUTED: routing}))
        for one in (own, again):
            assert torch.equal(one[0], expected[0])
            assert all(torch.equal(one[2][name], grad) for name, grad in expected[2].items())


ADAPTERS = {
    "experts and routers": {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.gate.weight"]},
    "all-linear": {"target_modules": "all-linear"},
}


def merged_weights(model) -> dict[str, torch.Tensor]:
    """The weights of adapted layers with the products of their adapters, through which gradients reach these."""
    found = {}
    for path, module in model.get_base_model().named_modules():
        if isinstance(module, BaseTunerLayer):
            leaf = getattr(module, "parameter_name", "weight")
            weight = getattr(module.get_base_layer(), leaf)
            found[f"{clean_name(path)}.{leaf}"] = weight + module.get_delta_weight("default")
    return found


@pytest.mark.parametrize("targets", ADAPTERS)
@pytest.mark.parametrize("family", MIXTURES)
def test_adapters_of_experts_and_routers_replay(family, targets):
    """Logits and the adapters' gradients are those of merged weights in a loop, layers computed again or not."""
    settings, given = GATES[family][0], small_batch()
    ids, mask = given["input_ids"], given["attention_mask"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        adapter = LoraConfig(r=4, lora_alpha=16, init_lora_weights=False, **ADAPTERS[targets])
        model = get_peft_model(mixture_of(family, **settings), adapter).train()
    accept_routing(model)
    choices = routed(given, model.get_base_model())
    slow = mixture_of(family, **settings).train()
    compute_slowly(slow, family, settings, choices.experts)
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    routers_trained = [name for name in trained if ".mlp.gate." in name]
    assert len(routers_trained) == 2 * len(blocks_of(slow)) * (family != "qwen2_moe" or targets != "all-linear")

    def computed(call):
        model.zero_grad()
        logits = call()[mask.bool()]
        logits.log_softmax(-1)[:, 7].sum().backward()
        return logits.detach(), torch.cat([param.grad.flatten() for param in trained.values()])

    asked = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    expected = computed(lambda: functional_call(slow, merged_weights(model), kwargs=asked).logits)
    without = computed(lambda: model(**asked).logits)
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        found = computed(lambda: model(**asked, **{ROUTED: choices}).logits)
        for own, right, other in zip(found, expected, without, strict=True):
            assert (own - right).norm() < 1e-4 * right.norm() < 1e-3 * (other - right).norm()


def test_each_backward_pass_has_the_routing_of_its_forward_pass():
    """With gradient checkpointing, although another pass with another routing stands between the two."""
    given, model = small_batch(), replaying("qwen3_moe")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    first, second = routed(given, model), routed(given, model, seed=9)
    expected = gradients(model, model, given | {ROUTED: first})

    def between(**given):
        output = model(**given)
        model(**given | {ROUTED: second})
        return output

    found = gradients(model, between, given | {ROUTED: first})
    assert all(torch.equal(found[2][name], grad) for name, grad in expected[2].items())
    assert farthest(gradients(model, model, given | {ROUTED: second}), expected) > 0.1


@pytest.mark.parametrize("family", MIXTURES)
def test_what_differs_is_counted(family):
    """Of the tokens whose routing is known, those for which the router itself would choose another set."""
    model, given = replaying(family), small_batch()
    row, mask = given["input_ids"][1], given["attention_mask"][1].bool()
    one = {name: values[1:2] for name, values in given.items()}
    choices = routed(one, model)
    own = chosen_again(model, family, row[mask].tolist())
    compared = Routed(choices.experts, replays=False)
    model(**one | {ROUTED: compared}, fused_lm_head=True)
    assert compared.compared.keys() == own.keys()
    for number, sets in own.items():
        planted = choices.experts[0, mask, number].long()[:-1]
        sampled = torch.nn.functional.one_hot(planted, 4).sum(1).bool()
        differs = (sampled != sets[:-1]).any(1).sum().item()
        assert compared.compared[number].tolist() == [differs, len(planted)] and 0 < differs < len(planted)
    counted = {number: found.tolist() for number, found in compared.compared.items()}
    accept_packed_rows(model)
    packed = Routed(choices.experts, replays=False)  # copies of a token fill the row, and do not count
    PackedRows(model, PROMPT, True)(**one | {ROUTED: packed}, fused_lm_head=True)
    assert {number: found.tolist() for number, found in packed.compared.items()} == counted
    flipped = Routed(choices.experts.flip(-1), replays=False)  # another order of the same experts
    model(**one | {ROUTED: flipped}, fused_lm_head=True)
    assert {number: found.tolist() for number, found in flipped.compared.items()} == counted


def test_scores_that_underflow_give_no_nan():
    model = mixture_of("mixtral")
    (router, _) = routers(model)
    logits = torch.tensor([[300.0, 0.0, -1.0, 0.0]], requires_grad=True)
    weights = gates(router.module, router.scores, logits, torch.tensor([[1, 2]]))
    weights.sum().backward()
    assert weights.tolist() == [[0.0, 0.0]] and logits.grad.isfinite().all()


def test_dense_models_take_no_routing():
    model = tiny_model("qwen3")
    accept_routing(model)
    assert not takes_routing(model) and not routers(model)


def test_hooks_are_set_once():
    model = replaying("mixtral")
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    accept_routing(model)
    assert takes_routing(model) and hooks == 4
    assert sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()) == hooks


# The load-balancing loss


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral"])
@pytest.mark.parametrize("replays", [False, True])
def test_the_load_is_balanced_as_in_padded_rows(monkeypatch, family, replays):
    """A prompt that three rows share counts three times, and what fills a packed row does not count."""
    model, given = replaying(family), small_batch() | {"output_router_logits": True}
    asked = given | ({ROUTED: routed(given, model)} if replays else {})

    def balanced(call):
        model.zero_grad()
        loss = call(**asked, fused_lm_head=True).aux_loss
        loss.backward()
        return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    logits, hooks = [], []
    for block in blocks_of(model).values():
        hooks.append(block.gate.register_forward_hook(lambda _, args, output: logits.append(output[0])))
    loss, padded = balanced(model)
    for hook in hooks:
        hook.remove()
    assert loss == pytest.approx(slow_balance([x.detach() for x in logits], given["attention_mask"]).item(), rel=1e-5)
    accept_packed_rows(model)
    for shares in (False, True):
        packed_loss, packed = balanced(PackedRows(model, PROMPT, shares))
        assert packed_loss == pytest.approx(loss, rel=1e-5) and packed.keys() == padded.keys()
        for name, grad in padded.items():
            assert (packed[name] - grad).norm() < 1e-4 * grad.norm(), name
    monkeypatch.setattr(Packed, "copies", lambda packed: torch.ones_like(packed.positions))
    assert abs(balanced(PackedRows(model, PROMPT, True))[0] - loss) > 1e-3
