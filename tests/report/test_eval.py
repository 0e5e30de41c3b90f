"""`trl-quant eval`: models whose answers are known, estimates against slow ones, and evaluations that were killed."""

import json
import math
import re
import zlib
from datetime import date, datetime
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from drawing import generated
from known_model import CHANCES, QUESTIONS, command, result, rows, save_known, write
from peft import LoraConfig, get_peft_model
from PIL import Image
from tiny import save_tiny, tiny_tokenizer
from training import lora
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2Config, TrainingArguments

import trl_quant.report.evaluation as evaluation
from trl_quant.cli import main
from trl_quant.report.trained import Trained, check_length
from trl_quant.rollout import TransformersEngine
from trl_quant.rollout.engine import Samples
from trl_quant.storage.layout import quantize_checkpoint
from trl_quant.tasks.benchmarks import load_questions
from trl_quant.tasks.data import token_ids
from trl_quant.tasks.estimates import estimates, wilson
from trl_quant.tasks.named_rewards import name_of


@pytest.fixture(autouse=True)
def fresh_accelerator(tmp_path):
    """A process has one mixed precision; what a trainer's arguments do lets the next test have another."""
    TrainingArguments(str(tmp_path / "unused"), use_cpu=True, bf16=False).device  # noqa: B018


# A model of which each token's chances are known from the token before


@pytest.fixture(scope="module")
def known(tmp_path_factory) -> str:
    return save_known(tmp_path_factory.mktemp("known") / "model")


@pytest.fixture
def argv(known, tmp_path) -> list[str]:
    return command(known, tmp_path)


@pytest.mark.parametrize("name", ["completions", "prompts"])
def test_a_column_with_the_name_of_an_argument_is_left_out(argv, tmp_path, name):
    """A file may hold another model's completions."""
    path = write(tmp_path / "own.jsonl", *({**row, name: "x"} for row in QUESTIONS))
    assert load_questions("jsonl", path).column_names == ["prompt", "answer"]
    main([*argv, "--data", path])
    assert result(tmp_path)["metrics"]["accuracy"]["value"] == 1


def test_greedy(argv, tmp_path, capsys):
    """The likeliest tokens, each question once; a wrong answer of one of six is a sixth less."""
    main(argv)
    found = result(tmp_path)
    assert [row["completion"] for row in rows(tmp_path)] == ["3", "7", "1"] * 2
    assert found["metrics"] == {"accuracy": {"value": 1.0, "low": wilson(6, 6)[0], "high": 1.0}}
    assert (found["mean_tokens"], found["cut_off"]) == (2, 0)
    settings = found["settings"]
    assert (settings["temperature"], settings["rollout_precision"], settings["questions"]) == (0, "bf16", 6)
    told, own = (version.partition("+")[0] for version in (found["versions"]["torch"], torch.__version__))
    assert told == own and found["machine"]
    printed = " ".join(capsys.readouterr().out.split())
    assert "accuracy 100.0% 61.0% to 100.0%" in printed and "jsonl, 6 questions, 2 tokens an answer" in printed

    write(tmp_path / "data.jsonl", *QUESTIONS[:5], {"prompt": "c", "answer": "2"})
    main([*argv, "--output", str(tmp_path / "new" / "other.json"), "--max_completion_length", "1"])
    other = result(tmp_path, "new/other")
    assert other["metrics"]["accuracy"]["value"] == 5 / 6 and other["cut_off"] == 1


def test_greedy_is_that_of_transformers(tmp_path):
    """Token by token, with ties and without, also in a batch of prompts of different lengths."""
    path = save_tiny(tmp_path / "model", seed=3)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), tiny_tokenizer()
    engine = TransformersEngine(
        model, Accelerator(cpu=True), tokenizer, precision="bf16", temperature=0, max_completion_length=12
    )
    prompts = [[72, 101, 108], [50, 43, 50, 61, 32, 7], [9]]
    _, found, logps, _ = generated(engine, prompts)
    for prompt, ids in zip(prompts, found, strict=True):
        expected = engine.copy.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12, pad_token_id=256)
        assert ids == expected[0, len(prompt) :].tolist()[: len(ids)]
    assert {logp for row in logps for (logp,) in row} == {0.0}  # what is certain has probability 1
    with torch.no_grad():
        engine.copy.lm_head.weight.zero_()
    assert generated(engine, prompts)[1] == [[0] * 12] * 3


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral"])
def test_experts_answer_in_the_precision_that_is_named(family, tmp_path):
    """As the embedded engine of a run, by whose numbers experts are right elsewhere."""
    path = save_tiny(tmp_path / "model", family, seed=3, initializer_range=0.3)
    argv = [*command(path, tmp_path), "--max_completion_length", "24", "--rollout_precision"]
    answers = {}
    for precision in ("bf16", "int4"):
        main([*argv, precision, "--output", str(tmp_path / f"{precision}.json")])
        answers[precision] = [row["completion"] for row in rows(tmp_path, precision)]
        assert result(tmp_path, precision)["settings"]["rollout_precision"] == precision
        model, tokenizer = AutoModelForCausalLM.from_pretrained(path), tiny_tokenizer()
        settings = {"temperature": 0, "max_completion_length": 24}
        engine = TransformersEngine(model, Accelerator(cpu=True), tokenizer, precision=precision, **settings)
        engine.sync()
        asked = [[{"role": "user", "content": question["prompt"]}] for question in QUESTIONS]
        ids = generated(engine, token_ids(asked, tokenizer))[1]
        assert tokenizer.batch_decode(ids, skip_special_tokens=True) == answers[precision]
    assert answers["bf16"] != answers["int4"]


def test_sampling(argv, tmp_path):
    """By the chances at the temperature, less what top-p cuts off; estimates count what is on disk."""
    argv = [*argv, "--num_samples", "200", "--batch_size", "100"]
    main(argv)
    found, answers = result(tmp_path), rows(tmp_path)
    assert (found["settings"]["temperature"], found["settings"]["top_p"]) == (0.6, 0.95)
    powers = {digit: chance ** (1 / 0.6) for digit, chance in CHANCES["a"].items()}
    kept = {"3": powers["3"], "4": powers["4"]}  # 0.74 and 0.23 are more than 0.95
    texts = [row["completion"] for row in answers if row["question"] in (0, 3)]
    assert {*texts} == {*kept} and len(texts) == 400
    expected = kept["3"] / sum(kept.values())
    assert texts.count("3") / 400 == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / 400))
    assert texts[:200] != texts[200:] and [row["sample"] for row in answers] == [*range(200)] * 6
    right = [sum(row["score"] for row in answers if row["question"] == question) for question in range(6)]
    assert found["metrics"] == json.loads(json.dumps(estimates([int(c) for c in right], 200)))
    assert 0.6 < found["metrics"]["avg@200"]["value"] < 0.95 < found["metrics"]["pass@8"]["value"]

    main([*argv, "--temperature", "1", "--top_p", "1", "--output", str(tmp_path / "wide.json")])
    texts = [row["completion"] for row in rows(tmp_path, "wide") if row["question"] in (0, 3)]
    for digit, chance in CHANCES["a"].items():
        assert texts.count(digit) / 400 == pytest.approx(chance, abs=4 * math.sqrt(chance * (1 - chance) / 400))


class Killed(Exception):
    """What a killed process does not see either."""


@pytest.mark.parametrize("tail", ["", '{"question": 1, "samp', '{"question": 5, "sample": 1}\n', "7\n"])
def test_a_killed_evaluation_goes_on(argv, tmp_path, monkeypatch, tail):
    """To the very file and result of one that was not, after a half-written batch too; then nothing is asked again."""
    argv = [*argv, "--num_samples", "5", "--batch_size", "7"]
    whole = [*argv, "--output", str(tmp_path / "whole.json")]
    main(whole)
    draw, asked = TransformersEngine.draw, []

    def until_killed(self, requests):
        asked.append(len(requests))
        if len(asked) == 3:
            raise Killed
        return draw(self, requests)

    monkeypatch.setattr(TransformersEngine, "draw", until_killed)
    with pytest.raises(Killed):
        main(argv)
    assert len(rows(tmp_path)) == 14 and not (tmp_path / "out.json").exists()
    lines = (tmp_path / "out.jsonl").read_text().splitlines(keepends=True)
    kept = lines if not tail else lines[:-3]  # the header, a batch, and a part of the second
    (tmp_path / "out.jsonl").write_text("".join(kept) + tail)
    main([*argv, "--vllm_gpu_memory_utilization", "0.5"])
    assert asked[3:] == ([7, 7, 2] if not tail else [7, 7, 7, 2])
    assert (tmp_path / "out.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()
    assert result(tmp_path) == result(tmp_path, "whole")

    monkeypatch.setattr(evaluation, "build_engine", lambda *args, **kwargs: pytest.fail("nothing is left to ask"))
    main(whole)
    assert result(tmp_path) == result(tmp_path, "whole")


def test_batches_differ_in_their_random_state(argv, tmp_path):
    """Or each batch of one question would have the same answers; another seed has others."""
    write(tmp_path / "data.jsonl", {"prompt": "b", "answer": "7"})
    texts = []
    for seed in ("0", "1"):
        options = ["--num_samples", "64", "--batch_size", "16", "--seed", seed, "--top_p", "1", "--temperature", "1"]
        main([*argv, *options, "--output", str(tmp_path / f"{seed}.json")])
        found = [row["completion"] for row in rows(tmp_path, seed)]
        texts += ["".join(found[i : i + 16]) for i in range(0, 64, 16)]
    assert len({*texts}) == 8


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (["--num_samples", "3"], "0.6 here; top_p: 1.0 there, 0.95 here; num_samples: None there, 3 here"),
        (["--rollout_precision", "int8"], "rollout_precision: 'bf16' there, 'int8' here"),
        (["--num_questions", "5"], "num_questions: None there, 5 here; questions: 6 there, 5 here; questions_digest"),
        (["--seed", "1"], "(seed: 0 there, 1 here)"),
        (["--instruction", "Think."], "instruction: '' there, 'Think.' here; questions_digest"),
    ],
)
def test_other_settings_are_refused_with_what_differs(argv, tmp_path, monkeypatch, extra, says):
    main(argv)
    before = (tmp_path / "out.jsonl").read_text()
    monkeypatch.setattr(evaluation, "build_engine", lambda *args, **kwargs: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit) as error:
        main([*argv, *extra])
    assert "out.jsonl holds answers of another evaluation" in error.value.code and says in error.value.code
    assert (tmp_path / "out.jsonl").read_text() == before


def test_other_questions_weights_and_files_are_refused(argv, tmp_path):
    argv[1] = save_known(tmp_path / "model")
    main(argv)
    write(tmp_path / "data.jsonl", *QUESTIONS[:5], {"prompt": "1c", "answer": "2"})
    with pytest.raises(SystemExit, match="questions_digest"):
        main(argv)
    write(tmp_path / "data.jsonl", *QUESTIONS)
    save_known(tmp_path / "model")
    with pytest.raises(SystemExit, match=r"\(weights: '\w+' there"):
        main(argv)
    (tmp_path / "out.jsonl").write_text('{"prompt": "mine"}\n')
    with pytest.raises(SystemExit, match="holds no answers of an evaluation"):
        main(argv)
    assert (tmp_path / "out.jsonl").read_text() == '{"prompt": "mine"}\n'


@pytest.mark.parametrize("chat", [False, True])
def test_what_the_model_is_asked(argv, tmp_path, monkeypatch, chat):
    """The question, then the instruction; in the model's chat template, if it has one."""
    argv[1] = save_known(tmp_path / "model", chat)
    draw, asked = TransformersEngine.draw, []
    monkeypatch.setattr(TransformersEngine, "draw", lambda self, asking: asked.extend(asking) or draw(self, asking))
    main([*argv, "--instruction", "Be a", "--num_questions", "1"])
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n" if chat else "{}"
    assert tiny_tokenizer().decode(asked[0].prompt) == turn.format("0a\n\nBe a")


def test_a_run_is_evaluated_in_its_precision(argv, tmp_path):
    """Its newest whole checkpoint, an adapter, whose change is seen in the answers."""
    from trl_quant.runs.checkpoints import write_rollout_state

    base = AutoModelForCausalLM.from_pretrained(save_known(tmp_path / "base"))
    config = lora()
    config.target_modules = ["lm_head"]
    policy = get_peft_model(base, config)
    token = {text: tiny_tokenizer()(text)["input_ids"][0] for text in "c2"}
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_A" in name:
                parameter.zero_()
                parameter[0, token["c"]] = 1.0
            elif "lora_B" in name:
                parameter.zero_()
                parameter[token["2"], 0] = 50.0
    policy.save_pretrained(tmp_path / "run" / "checkpoint-1")
    (tmp_path / "run" / "checkpoint-1" / "trainer_state.json").write_text('{"log_history": []}')
    write_rollout_state(tmp_path / "run" / "checkpoint-1", {"settings": {"rollout_precision": "int8"}})
    argv[1] = str(tmp_path / "run")
    main(argv)
    assert [row["completion"] for row in rows(tmp_path)] == ["3", "7", "2"] * 2
    found = result(tmp_path)
    assert found["settings"]["rollout_precision"] == "int8"
    assert found["settings"]["checkpoint"].endswith("checkpoint-1") and found["metrics"]["accuracy"]["value"] == 4 / 6


@pytest.mark.parametrize(("precision", "lora_sync"), [("nvfp4", "merge"), ("int8", "adapter")])
def test_a_run_on_a_prepared_base_is_evaluated(argv, tmp_path, precision, lora_sync):
    """Its policy equals that of a run which quantized the same weights by itself."""
    from trl_quant.runs.checkpoints import write_rollout_state

    bases = {"wide": save_tiny(tmp_path / "wide", tied=False, dtype=torch.bfloat16)}
    bases["packed"] = str(quantize_checkpoint(bases["wide"], tmp_path / "packed", precision))
    settings = {"rollout_precision": precision, "train_precision": precision, "lora_sync": lora_sync}
    ids, logits = torch.tensor([[72, 101, 108, 50, 43]]), {}
    for name, base in bases.items():
        torch.manual_seed(0)
        adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(bases["wide"]), lora())
        adapted.peft_config["default"].base_model_name_or_path = base
        adapted.save_pretrained(tmp_path / name / "run")
        write_rollout_state(tmp_path / name / "run", {"settings": settings})
        policy = Trained.find(str(tmp_path / name / "run")).policy(precision, torch.float32, lora_sync == "merge")
        logits[name] = policy(ids).logits
    torch.testing.assert_close(logits["packed"], logits["wide"])
    argv[1] = str(tmp_path / "packed" / "run")
    main(argv)
    assert len(rows(tmp_path)) == 6 and result(tmp_path)["settings"]["train_precision"] == precision
    with pytest.raises(SystemExit, match=f"`--train_precision`='bf16', but .* holds its weights only in '{precision}'"):
        main([*argv, "--train_precision", "bf16"])


def test_an_adapter_of_a_model_that_reads_images_is_evaluated(tmp_path):
    """Its names are those of the whole model, which TRL trains; `AutoModelForCausalLM` would make the text's."""
    from readers import load_reader, save_reader

    published, _ = load_reader(save_reader(tmp_path / "model", "qwen3_5"), torch.float32)
    ids = torch.tensor([[72, 101, 108, 50, 43]])
    plain = published(ids).logits
    layers = r".*language_model.*\.(in_proj_qkv|in_proj_a|q_proj)"
    adapted = get_peft_model(published, lora(target_modules=layers))
    adapted.save_pretrained(tmp_path / "run")
    found = Trained.find(str(tmp_path / "run")).policy("bf16", torch.float32, True)(ids).logits
    expected = adapted(ids).logits
    assert torch.equal(found, expected) and (found - plain).abs().max() > 0.1


def test_a_run_is_evaluated_with_its_chat_template_arguments(argv, tmp_path):
    """Of which one may, say, turn thinking off."""
    from trl_quant.runs.checkpoints import write_rollout_state

    checkpoint = tmp_path / "run" / "checkpoint-1"
    save_known(checkpoint)
    (checkpoint / "trainer_state.json").write_text('{"log_history": []}')
    template = "{{ messages[0]['content'] if enable_thinking else messages[0]['content'][::-1] }}"
    (checkpoint / "chat_template.jinja").write_text(template)
    argv[1], digests = str(tmp_path / "run"), []
    for given in ("None", "{'enable_thinking': True}"):
        write_rollout_state(checkpoint, {"arguments": {"chat_template_kwargs": given}})
        main([*argv, "--output", str(tmp_path / f"{len(digests)}.json")])
        digests.append(json.loads((tmp_path / f"{len(digests)}.json").read_text())["settings"]["prompts_digest"])
    assert digests[0] != digests[1]


def saved_run(path, reward, **state) -> str:
    """The known model, as a run that trained with a reward."""
    from trl_quant.runs.checkpoints import write_rollout_state

    save_known(path)
    (path / "trainer_state.json").write_text(json.dumps({"log_history": []} | state))
    write_rollout_state(path, {"arguments": {"reward_funcs": [name_of(reward)]}})
    return str(path)


def dated(completions, created, picture, **kwargs) -> list[float]:
    """A reward that reads a date and an image."""
    pairs = zip(created, picture, strict=True)
    return [when.year - 2024 + image.getpixel((0, 0)) / 100 for when, image in pairs]


def test_questions_may_hold_dates_images_and_bytes(argv, tmp_path, monkeypatch):
    """They come to the reward as they are, and a change of one is told from a file that was written again."""

    def save(day: int = 1, color: int = 0, size: tuple = (2, 3), raw: bytes = b"x") -> None:
        own = {"created": datetime(2024, 5, day), "day": date(2024, 5, day), "raw": raw}
        rows = [row | own | {"picture": Image.new("L", size, color)} for row in QUESTIONS[:2]]
        Dataset.from_list(rows).to_parquet(tmp_path / "own.parquet")

    argv[1] = saved_run(tmp_path / "run", dated)
    argv = [*argv[:2], *argv[4:], "--data", str(tmp_path / "own.parquet")]
    save(color=50)
    main(argv)
    assert result(tmp_path)["metrics"]["reward"]["value"] == 0.5
    monkeypatch.setattr(evaluation, "build_engine", lambda *args, **kwargs: pytest.fail("nothing is left to ask"))
    save(color=50)
    main(argv)
    for other in ({"day": 2}, {"color": 51}, {"size": (3, 2)}, {"raw": b"y"}):
        save(**{"color": 50} | other)
        with pytest.raises(SystemExit, match=r"\(questions_digest: '\w{8}' there, '\w{8}' here\)"):
            main(argv)


def test_the_digest_of_questions_of_text_is_that_of_their_json(argv, tmp_path):
    main(argv)
    columns = {name: [row[name] for row in QUESTIONS] for name in ("answer", "prompt")}
    assert result(tmp_path)["settings"]["questions_digest"] == f"{zlib.crc32(json.dumps(columns).encode()):08x}"


def staged(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric) -> list[float]:
    """A reward that changes over the run."""
    log_extra("answer", answer)
    log_metric("stage", 1.0)
    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)


def test_a_reward_is_called_as_at_the_runs_last_step(argv, tmp_path):
    argv[1] = saved_run(tmp_path / "run", staged, global_step=3, max_steps=4)
    main([*argv[:2], *argv[4:]])
    assert result(tmp_path)["metrics"]["reward"]["value"] == 0.75


def test_completions_are_no_longer_than_the_context(tmp_path):
    """As in training: vLLM and learned positions end there, and another rotation is only told of."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100, "rope_theta": 1e6}
    small = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 100}
    configs = {
        "plain": (Qwen2Config(**small, max_position_embeddings=100), 100),
        "yarn": (Qwen2Config(**small, max_position_embeddings=100, rope_parameters=yarn), 400),
        "learned": (GPT2Config(n_positions=100), 100),
    }
    for name, (config, context) in configs.items():
        config.save_pretrained(tmp_path / name)
        model = SimpleNamespace(base=str(tmp_path / name), of_base={})
        for engine in ("vllm", "embedded"):
            options = SimpleNamespace(engine=engine, max_completion_length=context - 10)
            assert not check_length(options, model, 9)
            told = f"={context - 10} is too long: the longest prompt has 10 tokens, and .*`={context}\\."
            if engine == "vllm" or name == "learned":
                with pytest.raises(ValueError, match=told):
                    check_length(options, model, 10)
            else:
                (line,) = check_length(options, model, 10)
                assert re.search(told, line) and "for which the model was not trained" in line


def test_completions_beyond_the_context_are_told(argv, tmp_path, capsys):
    main([*argv, "--max_completion_length", "3000"])
    assert "the longest prompt has 2 tokens, and the model's" in " ".join(capsys.readouterr().out.split())
    assert result(tmp_path)["metrics"]["accuracy"]["value"] == 1


@pytest.mark.parametrize("task", ["countdown", "sudoku", "arithmetic"])
def test_generated_tasks(argv, tmp_path, task):
    """From the question to the score; a random model solves none."""
    kwargs = {"countdown": '{"max_numbers": 3}', "sudoku": '{"max_blanks": 5}', "arithmetic": '{"max_digits": 2}'}
    argv = [*argv[:2], "--task", task, *argv[6:], "--num_questions", "4", "--task_kwargs", kwargs[task]]
    main(argv)
    assert result(tmp_path)["metrics"]["accuracy"]["value"] == 0
    assert [row["score"] for row in rows(tmp_path)] == [0.0] * 4
    assert result(tmp_path)["settings"]["source"].items() > json.loads(kwargs[task]).items()


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (["--num_samples", "0"], "`--num_samples`=0 is out of range"),
        (["--batch_size", "0"], "`--batch_size`=0 is out of range"),
        (["--num_questions", "-1"], "`--num_questions`=-1 is out of range"),
        (["--temperature", "0.6"], "`--temperature` acts only with `--num_samples`"),
        (["--top_p", "0.9"], "`--top_p` acts only with `--num_samples`"),
        (["--num_samples", "2", "--temperature", "0"], "`--temperature`=0 is out of range"),
        (["--num_samples", "2", "--top_p", "1.5"], "`--top_p`=1.5 is out of range"),
        (["--output", "{tmp}/out.txt"], "out.txt': results are written as .json"),
        (["--task_kwargs", "[1]"], "`--task_kwargs`='[1]' is not a JSON object"),
        (["--task", "arithmetic", "--task_kwargs", "[]"], "`--task_kwargs`='[]' is not a JSON object"),
        (["--task_kwargs", '{"max_target": 9}'], "`task_kwargs`: jsonl takes no max_target=9"),
        (["--task", "countdown", "--task_kwargs", '{"max_target": 99}'], "`task_kwargs` act only on generated"),
        (["--data", "{tmp}/nowhere.jsonl"], "there is no such file"),
        (["--data", "{tmp}/texts.jsonl"], "has no prompts"),
        (["--data", "{tmp}/open.jsonl"], "`--task jsonl` needs 'answer'"),
        (["--data", "{tmp}/half.jsonl"], "half.jsonl': row 1 has no answer to compare with"),
        (["--data", "{tmp}/chat.jsonl", "--instruction", "Think."], "cannot follow prompts that are conversations"),
        (["--task", "countdown"], "`--task countdown` needs 'nums', 'target'"),
        (["--engine", "vllm", "--rollout_precision", "int4"], "does not run in vLLM"),
        (["--vllm_engine_kwargs", '{"seed": 1}'], "acts only with `--engine vllm`"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_loaded(argv, extra, says, tmp_path, monkeypatch):
    write(tmp_path / "texts.jsonl", {"text": "1+1="})
    write(tmp_path / "open.jsonl", {"prompt": "1+1="})
    write(tmp_path / "half.jsonl", {"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": None})
    write(tmp_path / "chat.jsonl", {"prompt": [{"role": "user", "content": "1?"}], "answer": "1"})

    def load(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", load)
    with pytest.raises(SystemExit) as error:
        main([*argv, *[part.replace("{tmp}", str(tmp_path)) for part in extra]])
    assert str(error.value.code).startswith("error: ") and says in error.value.code
    assert not (tmp_path / "out.jsonl").exists()


def test_bad_models_are_refused(argv, tmp_path):
    (tmp_path / "empty").mkdir()
    LoraConfig(base_model_name_or_path=None).save_pretrained(tmp_path / "adapter")
    for model, says in (
        ("empty", "`MODEL`='.*empty' holds no model and no adapter"),
        ("nowhere", "`MODEL`='.*nowhere' is neither a directory here"),
        ("adapter", "`MODEL`='.*adapter': the adapter_config.json in .*adapter does not name its base"),
    ):
        argv[1] = str(tmp_path / model)
        with pytest.raises(SystemExit, match=says):
            main(argv)
    main_without_data = ["eval", "m", "--task", "gsm9k"]
    with pytest.raises(SystemExit) as error:
        main(main_without_data)
    assert error.value.code == 2


@pytest.mark.vllm
@pytest.mark.skipif(torch.cuda.is_available(), reason="FP8 may run there")
def test_a_precision_that_vllm_lacks_here(argv):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    with pytest.raises(SystemExit, match=r"does not run in vLLM on this device.* with `--engine embedded` the"):
        main([*argv, "--engine", "vllm", "--rollout_precision", "fp8"])


@pytest.mark.vllm
@pytest.mark.skipif(torch.cuda.is_available(), reason="INT8 experts run there")
def test_a_precision_in_which_vllm_runs_no_experts_here(argv, tmp_path, monkeypatch):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    monkeypatch.setattr("trl_quant.rollout.build_engine", None)  # nothing is started
    argv[1] = save_tiny(tmp_path / "mixture", "qwen3_moe")
    with pytest.raises(SystemExit, match=r"run on a CPU in 'bf16' alone. Use 'bf16', or `--engine embedded`"):
        main([*argv, "--engine", "vllm", "--rollout_precision", "int8"])


@pytest.mark.vllm
def test_a_context_that_vllm_would_not_have(argv, monkeypatch):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", None)  # nothing is loaded
    with pytest.raises(SystemExit, match=r"error: .*the longest prompt has 2 tokens, and the model's `"):
        main([*argv, "--max_completion_length", "3000", "--engine", "vllm"])


@pytest.mark.vllm
def test_vllm(argv, tmp_path, monkeypatch):
    """Sampled as the embedded engine samples; cut off after a batch, it goes on to the same answers."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm_engines import SMALL, keep

    def build_engine(*args, **kwargs):
        keep(engine := build(*args, **kwargs))
        return engine

    build = evaluation.build_engine
    monkeypatch.setattr(evaluation, "build_engine", build_engine)
    argv = [*argv, "--engine", "vllm", "--vllm_engine_kwargs", json.dumps(SMALL), "--dtype", "bfloat16"]
    main([*argv, "--output", str(tmp_path / "greedy.json")])
    assert [row["completion"] for row in rows(tmp_path, "greedy")] == ["3", "7", "1"] * 2
    argv = [*argv, "--num_samples", "40", "--batch_size", "120"]
    main(argv)
    whole = (tmp_path / "out.jsonl").read_text()
    texts = [row["completion"] for row in rows(tmp_path) if row["question"] in (0, 3)]
    assert {*texts} == {"3", "4"} and texts.count("3") > texts.count("4") and texts[:40] != texts[40:]
    (tmp_path / "out.jsonl").write_text("".join(whole.splitlines(keepends=True)[:130]))
    main(argv)
    assert (tmp_path / "out.jsonl").read_text() == whole


# Models that compute nothing


@pytest.mark.parametrize("samples", [[], ["--num_samples", "2"]])
@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_have_no_score(argv, tmp_path, samples, name, value):
    argv[1] = save_known(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(argv[1])
    with torch.no_grad():
        model.get_parameter(name).view(-1)[5] = value
    model.save_pretrained(argv[1])
    with pytest.raises(SystemExit, match=f"its weight `{name}` holds NaN or infinity"):
        main([*argv, *samples])
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("samples", [[], ["--num_samples", "2"]])
def test_finite_weights_that_compute_nan_have_no_score(argv, tmp_path, samples):
    argv[1] = save_known(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(argv[1])
    with torch.no_grad():
        model.model.norm.weight.fill_(1e38)
        model.lm_head.weight.fill_(1e38).view(-1)[::2].neg_()
    model.save_pretrained(argv[1])
    with pytest.raises(SystemExit, match=r"NaN|not finite"):
        main([*argv, *samples])
    assert not (tmp_path / "out.json").exists() and rows(tmp_path) == []


@pytest.mark.parametrize("logp", [None, math.nan, -math.inf])
def test_an_engine_that_tells_no_number_has_no_score(argv, tmp_path, monkeypatch, logp):
    """As vLLM's does of NaN."""
    silent = Samples([[1]] * 3, [[logp]] * 3)
    monkeypatch.setattr(TransformersEngine, "draw", lambda self, requests: silent)
    with pytest.raises(SystemExit, match="`MODEL` computes log-probabilities that are not finite"):
        main(argv)
