"""Distillation between embeddings of different sizes, whose further rows are padding; and every documented pair."""

import re
from pathlib import Path

import pytest
import torch
from distilling import distil, slow_loss, weights_of
from long_tests import rest_is_long
from peft import get_peft_model
from places import ROOT
from plain import drawn_logps, logits_of
from tiny import VOCAB_SIZE, save_tiny, tiny_model, tiny_tokenizer
from tokenizers import AddedToken
from training import config, lora, make, metrics, step_and_batch
from transformers import AutoModelForCausalLM

from trl_quant import QuantPPOConfig, QuantPPOTrainer
from trl_quant.config.checks import RULES
from trl_quant.layers import FrozenLinear


PADDED = VOCAB_SIZE + 64
SGD = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "lr_scheduler_type": "constant", "max_steps": 1}
SIZES = {"student": (PADDED, VOCAB_SIZE), "teacher": (VOCAB_SIZE, PADDED)}  # rows of both, by which is the larger


def saved(path, larger: str, tied: bool = True) -> tuple[str, str]:
    """A student and a teacher, one of them with rows that are no tokens."""
    names = zip(("student", "teacher"), SIZES[larger], (3, 4), strict=True)
    return tuple(save_tiny(path / name, vocab_size=rows, seed=seed, tied=tied) for name, rows, seed in names)


@pytest.mark.parametrize(("tied", "loaded"), [(True, False), (False, True)], ids=["tied", "untied"])
@pytest.mark.parametrize("larger", SIZES)
def test_the_loss_is_that_of_the_shared_rows(tmp_path, larger, tied, loaded):
    """
    Models that TRL loads, and models that are loaded already. The gradient is that of both distributions over the
    smaller vocabulary, by slow loops, and not of all rows.
    """
    names = saved(tmp_path, larger, tied)
    student, other = (AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32) for name in names)
    given = [AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32) if loaded else name for name in names]
    trainer = distil(tmp_path, model=given[0], teacher_model=given[1], is_correction="tis", **SGD)
    before = {name: param.detach().clone() for name, param in trainer.model.named_parameters()}
    step, batch = step_and_batch(trainer)
    assert batch["completion_ids"].max() < VOCAB_SIZE
    logits, mask = logits_of(student, batch), batch["completion_mask"]
    with torch.no_grad():
        theirs = logits_of(other, batch)[..., :VOCAB_SIZE]

    def gradient(rows: int) -> torch.Tensor:
        mine = logits[..., :rows]
        weights = weights_of("tis", drawn_logps(mine, batch).detach(), batch["sampling_per_token_logps"], mask)
        padded = torch.nn.functional.pad(theirs, (0, mine.shape[-1] - VOCAB_SIZE), value=-30.0)
        loss = slow_loss(mine, padded, weights, mask, beta=1.0)
        grads = torch.autograd.grad(loss, [*student.parameters()], retain_graph=True)
        shapes = [param.shape for param in before.values()]
        return -torch.cat([grad[: shape[0]].flatten() for grad, shape in zip(grads, shapes, strict=True)]).double()

    assert (step - gradient(VOCAB_SIZE)).norm() < 5e-5 * step.norm()
    if larger == "student":
        assert (step - gradient(PADDED)).norm() > 1e-2 * step.norm()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("larger", SIZES)
def test_the_saved_student_is_whole(tmp_path, larger, tied):
    """Its config has the size of its embedding, ties what it tied, and it computes what was trained."""
    student, teacher = saved(tmp_path, larger, tied)
    trainer = distil(tmp_path, model=student, teacher_model=teacher, max_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    rows = (found.get_input_embeddings().weight, found.get_output_embeddings().weight)
    assert {found.config.vocab_size, *(len(weight) for weight in rows)} == {VOCAB_SIZE}
    assert (rows[0].data_ptr() == rows[1].data_ptr()) == tied == found.config.tie_word_embeddings
    ids = torch.arange(40).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(found(ids).logits, trainer.model.eval()(ids).logits)
    again = distil(tmp_path, model=str(tmp_path / "saved"), teacher_model=teacher, max_steps=1)
    again.train()
    assert metrics(again)[0]["loss"] > 0


@pytest.mark.parametrize("precision", rest_is_long(["nvfp4", "mxfp4"]))
def test_a_quantized_teacher_and_a_frozen_student(tmp_path, precision):
    """The decoders are held in 4 bits, and embeddings and heads are cut."""
    student, teacher = saved(tmp_path / "a", "teacher")
    trainer = distil(tmp_path, model=student, teacher_model=teacher, teacher_precision=precision)
    assert any(isinstance(module, FrozenLinear) for module in trainer.teacher_model.modules())
    assert trainer.teacher_model.config.vocab_size == len(trainer.teacher_model.lm_head.weight) == VOCAB_SIZE
    trainer.train()
    student, teacher = saved(tmp_path / "b", "student")
    given = {"teacher_model": teacher, "peft_config": lora()}
    trainer = distil(tmp_path, model=student, train_precision=precision, rollout_precision=None, **given)
    base = trainer.model.get_base_model()
    assert any(isinstance(module, FrozenLinear) for module in base.modules())
    assert base.config.vocab_size == len(base.lm_head.weight) == VOCAB_SIZE
    trainer.train()
    assert metrics(trainer)[0]["grad_norm"] > 0


def with_tokens(path: str, count: int, first: str = "new") -> str:
    """Adds tokens to the tokenizer of a saved model."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(f"<{first}_{i}>") for i in range(count)])
    tokenizer.save_pretrained(path)
    return path


def test_rows_that_are_tokens_are_not_cut(tmp_path):
    """Of the student's tokenizer or of the teacher's; nor is another vocabulary taken for a padded one."""
    student, teacher = saved(tmp_path, "teacher")
    unequal = (
        f"The student's vocabulary has {VOCAB_SIZE} tokens and the teacher's {PADDED}. Distillation compares their "
    )
    unequal += (
        "distributions token by token: use a teacher with the student's tokenizer. Only rows that are no tokens are "
    )
    unequal += "cut, and"

    def refused(says: str, **options):
        options = {"teacher_model": teacher, "processing_class": tiny_tokenizer()} | options
        with pytest.raises(ValueError, match=re.escape(f"{unequal} {says}")):
            distil(tmp_path, model=student, **options)

    with_tokens(teacher, 1)
    refused(f"'<new_0>', a token of the teacher's tokenizer, has the id {VOCAB_SIZE}.")
    tiny_tokenizer().save_pretrained(teacher)
    grown = tiny_tokenizer()
    grown.add_tokens(["<new_0>"])
    refused("'<new_0>', a token of the student's tokenizer", processing_class=grown)
    text = (Path(teacher) / "tokenizer.json").read_text()
    assert "<|reserved_7|>" in text
    swapped = text.replace("<|reserved_7|>", "<|x|>").replace("<|reserved_8|>", "<|reserved_7|>")
    (Path(teacher) / "tokenizer.json").write_text(swapped.replace("<|x|>", "<|reserved_8|>"))
    refused("their tokenizers give '<|reserved_")
    tiny_tokenizer().save_pretrained(teacher)
    assert distil(tmp_path, model=student, teacher_model=teacher).teacher_model.config.vocab_size == 320


def test_what_cannot_be_cut_is_refused(tmp_path, monkeypatch):
    """vLLM starts on a checkpoint that has the rows; an adapter of the embedding has them too."""
    monkeypatch.setitem(RULES, "machine", ())
    student, teacher = saved(tmp_path, "student")
    says = "but `use_vllm`=True starts vLLM on a checkpoint that has them. Cut and save the student first"
    with pytest.raises(ValueError, match=says):
        distil(tmp_path, model=student, teacher_model=teacher, use_vllm=True, rollout_precision="int8")
    adapted = get_peft_model(tiny_model(vocab_size=PADDED), lora(target_modules=["q_proj", "embed_tokens"]))
    with pytest.raises(
        ValueError, match=f"The student's embedding has {PADDED} rows, of which {VOCAB_SIZE} are shared"
    ):
        distil(tmp_path, model=adapted, teacher_model=teacher, rollout_precision=None)


# A critic


def test_a_critic_without_the_policys_padding(tmp_path):
    """Its embedding gets rows of zeros, and its values of tokens stay; one that lacks a token is refused."""
    policy = save_tiny(tmp_path / "policy", vocab_size=PADDED, seed=3)
    smaller = save_tiny(tmp_path / "smaller", seed=5)
    args = config(QuantPPOConfig, tmp_path, value_model_name_or_path=smaller, rollout_precision="int8", max_steps=1)
    trainer = make(QuantPPOTrainer, args, model=policy)
    critic, original = trainer.critic.model, AutoModelForCausalLM.from_pretrained(smaller, dtype=torch.float32)
    rows = critic.get_input_embeddings().weight
    assert len(rows) == critic.config.vocab_size == PADDED and rows[VOCAB_SIZE:].abs().max() == 0
    assert torch.equal(rows[:VOCAB_SIZE], original.get_input_embeddings().weight)
    trainer.train()
    assert metrics(trainer)[0]["value/loss"] > 0
    with_tokens(policy, 1)
    with pytest.raises(ValueError, match=f"has {VOCAB_SIZE} tokens, and the policy {PADDED}: '<new_0>', a token of"):
        make(QuantPPOTrainer, args, model=policy, processing_class=None)


# Documented pairs

# Facts of the checkpoints' configs (`vocab_size`); the tokenizers of all of them have 151665 tokens
ROWS = {
    "Qwen/Qwen2.5-0.5B-Instruct": 151936,
    "Qwen/Qwen2.5-1.5B-Instruct": 151936,
    "Qwen/Qwen2.5-3B-Instruct": 151936,
    "Qwen/Qwen2.5-7B-Instruct": 152064,
    "Qwen/Qwen2.5-14B-Instruct": 152064,
    "Qwen/Qwen2.5-32B-Instruct": 152064,
}
HUB = r"([\w.-]+/[\w.-]+)"
PAIRS = [
    rf'model="{HUB}",[\s.>]*teacher_model="{HUB}"',
    rf"--model_name_or_path {HUB}[\s\\]+(?:--(?!teacher)\S+ \S+[\s\\]+)*--teacher_model_name_or_path {HUB}",
]


def documented() -> set[tuple[str, str]]:
    """Students and teachers on every page, in every example and in every docstring."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*"), *ROOT.glob("trl_quant/**/*.py")]
    found = set()
    for page in (page for page in pages if page.suffix in (".md", ".py", ".yaml", ".sh")):
        text = page.read_text()
        pairs = [pair for pattern in PAIRS for pair in re.findall(pattern, text)]
        teachers = re.findall(rf'teacher_model(?:_name_or_path)?[=:]? ?"?{HUB}', text)
        assert len(pairs) == len(teachers), f"{page.name} has a teacher without a student beside it"
        found |= {*pairs}
    return found


def test_each_documented_pair_can_be_built(tmp_path, monkeypatch):
    """From their sizes alone: directories of these names have tiny models with embeddings of the real sizes."""
    pairs = documented()
    assert ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct") in pairs
    monkeypatch.chdir(tmp_path)
    tiny = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    for name in {name for pair in pairs for name in pair}:
        save_tiny(tmp_path / name, "qwen2", vocab_size=ROWS[name], **tiny)
    for student, teacher in sorted(pairs):
        trainer = distil(tmp_path, model=student, teacher_model=teacher, rollout_precision="fp8")
        rows = {model.config.vocab_size for model in (trainer.model, trainer.teacher_model)}
        assert rows == {min(ROWS[student], ROWS[teacher])}
        assert len(trainer.teacher_model.lm_head.weight) == len(trainer.model.lm_head.weight) == rows.pop()
