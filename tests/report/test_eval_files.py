"""`trl-quant eval` writes over no file but its own, and a disk that is full leaves what it wrote before."""

import json
from pathlib import Path

import pytest
from known_model import QUESTIONS, command, result, rows, save_known, write

import trl_quant.report.evaluation as evaluation
from trl_quant.cli import main


@pytest.fixture
def argv(tmp_path) -> list[str]:
    return command(save_known(tmp_path / "known"), tmp_path)


@pytest.fixture
def unloaded(monkeypatch):
    """No model may be loaded."""
    monkeypatch.setattr(evaluation, "build_engine", lambda *args, **kwargs: pytest.fail("a model was loaded"))


def refused(argv, directory: Path, says: str) -> None:
    """With one line, and every file as it was."""
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit) as error:
        main(argv)
    assert str(error.value.code).startswith("error: ") and says in error.value.code and "\n" not in error.value.code
    assert before == {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("output", ["data.json", "link.json", "sub/../data.json"])
@pytest.mark.parametrize("data", ["data.json", "data.jsonl"])
def test_the_data_is_never_the_output(argv, tmp_path, output, data, unloaded):
    """Nor are the answers beside the output."""
    write(tmp_path / data, *QUESTIONS)
    (tmp_path / "sub").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / data)
    (tmp_path / "link.jsonl").symlink_to(tmp_path / data)
    says = ", which is `--data`, or lies in it"
    refused([*argv, "--data", str(tmp_path / data), "--output", str(tmp_path / output)], tmp_path, says)


def test_an_output_among_the_data_is_refused(argv, tmp_path, unloaded):
    (tmp_path / "questions").mkdir()
    write(tmp_path / "questions/train.jsonl", *QUESTIONS)
    output = tmp_path / "questions/out.json"
    refused([*argv, "--data", str(tmp_path / "questions"), "--output", str(output)], tmp_path, "or lies in it")


MODELS_FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json"]
MODELS_FILES += ["adapter_config.json", "trainer_state.json", "rollout_state.json", "model.safetensors.index.json"]


@pytest.mark.parametrize("name", MODELS_FILES)
def test_a_file_of_the_model_is_never_the_output(argv, tmp_path, name, unloaded):
    """Whether it is there, or would change the model by being there."""
    argv[1] = save_known(tmp_path / "model")
    refused([*argv, "--output", str(tmp_path / "model" / name)], tmp_path, ", which is a file of the model")


def test_a_result_may_lie_beside_the_model(argv, tmp_path):
    argv[1] = save_known(tmp_path / "model")
    argv += ["--output", str(tmp_path / "model/eval.json")]
    main(argv)
    before = (tmp_path / "model/eval.json").read_text()
    main(argv)
    assert (tmp_path / "model/eval.json").read_text() == before


@pytest.mark.parametrize("text", ["", "mine", "[]", "{}", '{"task": "gsm8k", "metrics": {}}', '{"settings": 1}'])
def test_an_output_that_is_no_result_is_kept(argv, tmp_path, text, unloaded):
    (tmp_path / "out.json").write_text(text)
    refused(argv, tmp_path, "out.json exists, but is not the result of an evaluation")


def test_a_directory_is_no_output(argv, tmp_path, unloaded):
    (tmp_path / "out.json").mkdir()
    refused(argv, tmp_path, ", which is not a file")


def test_a_result_without_its_answers_is_kept_for_what_it_says(argv, tmp_path):
    main(argv)
    (tmp_path / "out.jsonl").unlink()
    refused([*argv, "--seed", "1"], tmp_path, "out.json holds answers of another evaluation (seed: 0 there, 1 here)")
    main(argv)
    assert len(rows(tmp_path)) == 6


@pytest.mark.parametrize("name", ["chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json"])
def test_answers_of_another_template_or_config_are_refused(argv, tmp_path, name, monkeypatch):
    """A changed one is told from one that was written again, which is the same."""
    argv[1] = save_known(tmp_path / "model", chat=True)
    main(argv)
    file = tmp_path / "model" / name
    text = file.read_text()
    file.write_text(text)
    main(argv)
    changed = json.dumps(json.loads(text) | {"new": 1}) if "config" in name else text + "\n"
    file.write_text(changed)
    monkeypatch.setattr(evaluation, "build_engine", lambda *args, **kwargs: pytest.fail("a model was loaded"))
    refused(argv, tmp_path, "configs: '")


def test_prompts_of_another_template_are_refused(argv, tmp_path, unloaded, monkeypatch):
    """Wherever it came from, as from the hub, whose files are not looked at."""
    answers = evaluation.describe
    monkeypatch.setattr(evaluation, "CONFIGS", ())
    with pytest.raises(pytest.fail.Exception):
        main(argv)
    monkeypatch.setattr(evaluation, "describe", lambda *given: answers(*given[:-1], given[-1][1:]))
    refused(argv, tmp_path, "(prompts_digest: '")


# A disk that becomes full


@pytest.mark.parametrize("when", ["header", "answers", "result"])
def test_a_full_disk_is_told_and_what_is_there_stays(argv, tmp_path, monkeypatch, when):
    """In one line; the same command goes on to the same result."""
    full = OSError(28, "No space left on device")
    if when == "answers":
        argv += ["--batch_size", "4"]
        monkeypatch.setattr(evaluation.Answers, "add", raising_after(evaluation.Answers.add, 1, full, tmp_path))
    else:
        write_bytes, calls = Path.write_bytes, []

        def write(self, data):
            calls.append(self)
            if len(calls) == (1 if when == "header" else 2):
                write_bytes(self, data[:5])
                raise full
            return write_bytes(self, data)

        monkeypatch.setattr(Path, "write_bytes", write)
    with pytest.raises(SystemExit) as error:
        main(argv)
    code = str(error.value.code)
    assert "No space left while writing" in code and "continues from there" in code and "\n" not in code
    assert not (tmp_path / "out.json").exists() and not [*tmp_path.glob(".out.*")]
    monkeypatch.undo()
    assert when == "header" or len(rows(tmp_path)) == {"answers": 4, "result": 6}[when]
    main(argv)
    assert result(tmp_path)["metrics"]["accuracy"]["value"] == 1 and len(rows(tmp_path)) == 6


def raising_after(add, times: int, error: OSError, directory: Path):
    """An `Answers.add` whose file is on a disk that is full after as many batches."""
    calls = []

    class Full(type(directory)):
        def open(self, *args, **kwargs):
            raise error

    def adding(self, rows):
        calls.append(1)
        if len(calls) > times:
            self.path = Full(self.path)
        add(self, rows)

    return adding
