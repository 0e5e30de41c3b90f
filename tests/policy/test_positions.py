"""Positions that depend on the longest row of a forward pass: LongRoPE and dynamic NTK.

With a `rollout_precision` a run chooses once, by its context, in sampler, scoring, loss, reference and critic. The
faults are made by leaving transformers' own choice in place.
"""

import json
from pathlib import Path

import pytest
import torch
from datasets import IterableDataset
from tiny import save_tiny, tiny_model
from training import PROMPTS, UnevenLengths, config, dataset, make, metrics, step_and_batch

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer, QuantPPOConfig, QuantPPOTrainer
from trl_quant.models.positions import switching, why_vllm_differs
from trl_quant.policy.positions import fix_positions, fixed_context, release_positions
from trl_quant.report.trained import Trained, context_like
from trl_quant.trainers import positions


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0 + n for n in range(16)]}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
BORDERS = (16, 30, 512)  # below every row, between rows, above every row


def longrope(border: int, **overrides) -> dict:
    """Settings of a tiny Phi-3 whose rows of more than `border` tokens take the long factors."""
    parameters = LONGROPE | {"original_max_position_embeddings": border} | overrides
    return {"rope_parameters": parameters, "original_max_position_embeddings": border}


def dynamic(border: int) -> dict:
    return {"rope_parameters": dict(DYNAMIC), "max_position_embeddings": border}


def first_tokens(model, others: int) -> torch.Tensor:
    """Logits of ten tokens, followed by `others` more in the same row."""
    ids = torch.arange(60, 70 + others).unsqueeze(0)
    with torch.no_grad():
        return model(ids).logits[:, :10]


@pytest.mark.parametrize(("family", "settings"), [("phi3", longrope(32)), ("llama", dynamic(32))])
def test_fixed_positions(family, settings):
    model = tiny_model(family, **settings)
    before, in_long = first_tokens(model, 0), first_tokens(model, 30)
    size = (before - in_long).abs().max()
    assert size > 0.1
    said = model.config.to_dict()
    fix_positions(model, 32)
    assert fixed_context(model) == 32 and torch.equal(first_tokens(model, 0), before)
    assert (first_tokens(model, 30) - before).abs().max() < 1e-4 * size
    fix_positions(model, 40)
    assert torch.equal(first_tokens(model, 30), in_long)
    assert (first_tokens(model, 0) - in_long).abs().max() < 1e-4 * size
    assert model.config.to_dict() == said
    release_positions(model)
    assert fixed_context(model) is None
    assert torch.equal(first_tokens(model, 0), before) and torch.equal(first_tokens(model, 30), in_long)


def test_other_positions_stay():
    model = tiny_model("llama")
    assert switching(model.config) is None
    fix_positions(model, 4096)
    assert fixed_context(model) is None


def test_code_that_chooses_by_itself():
    model = tiny_model("phi3", **longrope(32))
    rope = model.model.rotary_emb
    choose = rope.forward
    rope.forward = lambda x, places: choose(x, places * (2 if places.max() > 32 else 1))
    with pytest.raises(ValueError, match="its own code chooses in each forward pass"):
        fix_positions(model, 64)


def test_attention_factors():
    """vLLM reads other fields than transformers: where they say something else, no choice makes both equal."""
    config = tiny_model("phi3", **longrope(32)).config
    assert why_vllm_differs(config, None) is None and why_vllm_differs(config, 64) is None
    assert "chooses anew" in why_vllm_differs(config, 64, "transformers")
    assert why_vllm_differs(config, 32, "transformers") is None
    for given in ({"attention_factor": 1.3}, {"factor": 2.0}, {"long_mscale": 1.3}):
        config.rope_parameters = longrope(32, **given)["rope_parameters"]
        assert "attention factor" in why_vllm_differs(config, 64), given
    assert why_vllm_differs(config, 32) is None  # `long_mscale` alone


# Runs


def trained(tmp_path, model, trainer=QuantGRPOTrainer, settings=QuantGRPOConfig, data=None, **overrides):
    overrides = {"learning_rate": 0.0, "max_steps": 2, "max_completion_length": 16} | overrides
    args = config(settings, tmp_path, **{"rollout_precision": "bf16"} | overrides)
    run = make(trainer, args, model=model, train_dataset=dataset() if data is None else data)
    run.train()
    return run


def mismatch(run) -> float:
    return max(entry["mismatch/kl_k3"] for entry in metrics(run) if "mismatch/kl_k3" in entry)


@pytest.mark.parametrize("border", BORDERS)
def test_sampler_and_trainer_agree(tmp_path, border, monkeypatch):
    """Embedded, the border below, between and above the rows; transformers' own choice differs in the first two."""
    model = tiny_model("phi3", seed=3, **longrope(border))
    run = trained(tmp_path / "right", model, save_strategy="steps", save_steps=2)
    assert mismatch(run) < 3e-4
    context = max(map(len, PROMPTS)) + 16
    assert fixed_context(run.model) == fixed_context(run.vllm_generation.engine.copy) == context
    said = json.loads(Path(tmp_path, "right", "checkpoint-2", "config.json").read_text())
    assert said["rope_parameters"]["rope_type"] == "longrope"
    assert said["original_max_position_embeddings"] == border
    if border < 512:
        monkeypatch.setattr(positions, "fix_positions", lambda model, context: None)
        assert mismatch(trained(tmp_path / "wrong", tiny_model("phi3", seed=3, **longrope(border)))) > 0.05


def packed_and_padded(tmp_path, border: int) -> list[torch.Tensor]:
    """The step of one update on packed rows, and on the same rows padded to 24 tokens."""
    steps = []
    for packs in (True, False):
        batches = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "pack_sequences": packs}
        optimizer = {"learning_rate": 1.0, "optim": "sgd", "max_grad_norm": 0.0, "rollout_precision": "bf16"}
        lengths = {"max_steps": 1, "max_completion_length": 16}
        args = config(QuantGRPOConfig, tmp_path / str(packs), **batches | optimizer | lengths)
        run = make(QuantGRPOTrainer, args, model=tiny_model("phi3", seed=3, **longrope(border)))
        assert run.packs == packs
        steps.append(step_and_batch(run)[0])
    return steps


@pytest.mark.parametrize("border", [16, 26, 512])
def test_packed_rows_are_padded_ones(tmp_path, border, monkeypatch):
    """With a border of 26, transformers' own choice is long for the packed row alone."""
    packed, padded = packed_and_padded(tmp_path / "right", border)
    assert 0 < (packed - padded).norm() < 1e-4 * padded.norm()
    if border == 26:
        monkeypatch.setattr(positions, "fix_positions", lambda model, context: None)
        packed, padded = packed_and_padded(tmp_path / "wrong", border)
        assert (packed - padded).norm() > 0.1 * padded.norm()


class Recording(UnevenLengths, QuantGRPOTrainer):
    """Records the log-probabilities of each row in every pass that computes them."""

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, *args, **kwargs):
        found = super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, *args, **kwargs)
        for ids, mask, logps in zip(input_ids, attention_mask, found[0].detach(), strict=True):
            row = tuple(ids[mask.bool()].tolist())
            self.recorded.setdefault(row, []).append(logps[mask[-len(logps) :].bool()])
        return found


def test_scoring_and_loss_agree(tmp_path):
    """Both group rows of different lengths, shorter and longer than the border, in their own ways."""
    Recording.recorded = {}
    batches = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
    trained(tmp_path, tiny_model("phi3", seed=3, **longrope(14)), Recording, **batches)
    lengths, passes = set(map(len, Recording.recorded)), [rows for rows in Recording.recorded.values() if len(rows) > 1]
    assert min(lengths) < 14 < max(lengths) and len(passes) >= 6
    assert max((one - rows[0]).abs().max() for rows in passes for one in rows[1:]) < 1e-4


def test_packing_alone_is_refused(tmp_path):
    """Without a `rollout_precision` padded rows are TRL's, and choose by the padded width."""
    args = config(QuantGRPOConfig, tmp_path, pack_sequences=True)
    with pytest.raises(ValueError, match="`pack_sequences`=True cannot act: the policy has `rope_type`='longrope'"):
        make(QuantGRPOTrainer, args, model=tiny_model("phi3", **longrope(512)))


def test_without_a_precision_it_is_trls(tmp_path):
    """A model that an earlier run has fixed chooses in each pass again."""
    model = tiny_model("phi3", seed=3, **longrope(30))
    trained(tmp_path / "before", model)
    assert fixed_context(model) is not None
    run = trained(tmp_path / "after", model, rollout_precision=None)
    assert fixed_context(run.model) is None and run.model.model.rotary_emb.rope_type == "longrope"


def test_all_models_of_a_run(tmp_path):
    path = save_tiny(tmp_path / "policy", "phi3", seed=3, **longrope(30))
    run = trained(tmp_path / "run", path, QuantPPOTrainer, QuantPPOConfig, beta=0.1, max_steps=1)
    contexts = {fixed_context(model) for model in (run.model, run.ref_model, run.critic.model)}
    assert contexts == {max(map(len, PROMPTS)) + 16}


def test_prompts_that_are_drawn(tmp_path):
    """A stream's prompts are not known: the first row beyond the border stops the run, and shorter rows train."""
    stream = IterableDataset.from_generator(lambda: ({"prompt": prompt} for prompt in PROMPTS))
    assert mismatch(trained(tmp_path / "short", tiny_model("phi3", seed=3, **longrope(64)), data=stream)) < 3e-4
    with pytest.raises(ValueError, match=r"this run has chosen for at most 16.*`vllm_max_model_length` above 20"):
        trained(tmp_path / "long", tiny_model("phi3", seed=3, **longrope(20)), data=stream)


def test_a_resume_with_another_choice(tmp_path, caplog):
    """Rows may get longer, as long as their positions stay: the longest prompt has 23 tokens."""

    def built(length: int, **changes) -> QuantGRPOTrainer:
        settings = {"rollout_precision": "bf16", "save_strategy": "steps", "save_steps": 1, "max_steps": 1}
        args = config(QuantGRPOConfig, tmp_path, max_completion_length=length, **settings | changes)
        return make(QuantGRPOTrainer, args, model=tiny_model("phi3", seed=3, **longrope(36)))

    built(8).train()
    with pytest.raises(ValueError, match="chose positions for rows of up to 31 tokens, and this run for up to 39, wh"):
        built(16, max_steps=2).train(resume_from_checkpoint=True)
    built(10, max_steps=2).train(resume_from_checkpoint=True)
    assert "chose positions" not in caplog.text
    built(16, max_steps=3, resume_with_changes=True).train(resume_from_checkpoint=True)
    assert "chose positions for rows of up to 33 tokens, and this run for up to 39" in caplog.text


@pytest.mark.parametrize(
    ("family", "settings", "given", "words"),
    [
        (
            "llama",
            dynamic(64),
            {"vllm_max_model_length": 80},
            "`vllm_max_model_length`=80: .*'dynamic'.* to 64",
        ),
        ("llama", dynamic(64), {}, "`vllm_max_model_length`=None: .*'dynamic'"),
        (
            "phi3",
            longrope(64, attention_factor=1.5),
            {"vllm_max_model_length": 80},
            "attention factor of 1.5 .* where vLLM computes with 1.35",
        ),
        (
            "phi3",
            longrope(64),
            {"vllm_max_model_length": 80, "vllm_model_impl": "transformers"},
            "chooses anew in each forward pass",
        ),
    ],
)
def test_what_vllm_cannot_fix(tmp_path, family, settings, given, words):
    path = save_tiny(tmp_path / "policy", family, **settings)
    args = config(QuantGRPOConfig, tmp_path, rollout_precision="bf16", use_vllm=True, vllm_mode="colocate", **given)
    pytest.importorskip("vllm")
    with pytest.raises(ValueError, match=words):
        make(QuantGRPOTrainer, args, model=path)


@pytest.mark.vllm
@pytest.mark.parametrize("border", [64, 512])
def test_vllm_and_trainer_agree(tmp_path, border, monkeypatch):
    """With a context of 256 tokens: long factors for every row where the border is 64, else short ones."""
    vllm_engines = pytest.importorskip("vllm_engines")
    path = save_tiny(tmp_path / "policy", "phi3", seed=3, dtype=torch.bfloat16, **longrope(border))
    settings = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 256, "bf16": True}
    settings |= {"vllm_engine_kwargs": vllm_engines.SMALL}
    run = trained(tmp_path / "right", path, **settings)
    assert fixed_context(run.model) == 256
    right = mismatch(run)
    assert right < 5e-3
    if border == 64:
        monkeypatch.setattr(positions, "fix_positions", lambda model, context: None)
        settings["sync_check_steps"] = 0
        assert mismatch(trained(tmp_path / "wrong", path, **settings)) > 20 * right


# `trl-quant eval`


@pytest.mark.parametrize(
    ("trained_for", "needed", "context"), [(None, 40, 40), (64, 20, 33), (30, 20, 30), (30, 40, 40)]
)
def test_an_evaluation_chooses_as_its_run(trained_for, needed, context, caplog):
    config = tiny_model("phi3", **longrope(32)).config
    run = Trained("run", "run", False, None, {}, False, False, False, False, trained_for)
    assert context_like(run, config, needed) == context
    assert ("its positions differ" in caplog.text) == (trained_for == 30 and needed == 40)
