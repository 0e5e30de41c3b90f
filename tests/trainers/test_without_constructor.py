"""A trainer that was made without its constructor leaves each method to TRL's, as TRL's own tests of methods expect."""

import inspect
import re
from types import SimpleNamespace

import pytest
from trl import DistillationTrainer, GRPOTrainer, RLOOTrainer

from trl_quant import AISGRPOTrainer, QuantDistillationTrainer, QuantGRPOTrainer, QuantRLOOTrainer


TRAINERS = {
    QuantGRPOTrainer: GRPOTrainer,
    AISGRPOTrainer: GRPOTrainer,
    QuantRLOOTrainer: RLOOTrainer,
    QuantDistillationTrainer: DistillationTrainer,
}
# Whole trainings, their data and their checkpoints need what a constructor makes, also in TRL
WHOLE = re.compile(r"__init__|train|_run_epoch|create_\w+|_get_train_sampler|\w*(save|load)\w*")


class Answer(tuple):
    """What TRL's method returns: three or more results, of which a tensor may be detached."""

    def detach(self):
        return self

    def __iter__(self):
        return iter([self, None, None, None, None])

    def __getitem__(self, index):
        return self


def overridden(ours: type, trl: type) -> list[str]:
    """The methods of TRL's trainer that one of our classes defines again."""
    classes = ours.__mro__[: ours.__mro__.index(trl)]
    names = {name for kind in classes for name, value in vars(kind).items() if inspect.isfunction(value)}
    return sorted(name for name in names if callable(getattr(trl, name, None)) and not WHOLE.fullmatch(name))


@pytest.mark.parametrize(("ours", "trl"), TRAINERS.items(), ids=lambda kind: kind.__name__)
def test_each_method_is_trls(monkeypatch, ours, trl):
    """Made by `object.__new__`, and with the arguments that TRL's method takes."""
    names = overridden(ours, trl)
    assert {"_generate", "_compute_loss"} < {*names}
    for name in names:
        calls = []

        def method(self, *args, calls=calls, **kwargs):
            calls.append((args, kwargs))
            return Answer()

        parameters = inspect.signature(getattr(trl, name)).parameters.values()
        given = [object() for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
        with monkeypatch.context() as patch:
            patch.setattr(trl, name, method)
            trainer = object.__new__(ours)
            trainer.args = SimpleNamespace(dynamic_sampling_rounds=None)
            found = getattr(trainer, name)(*given[1:])
        ((args, kwargs),) = calls
        assert [one for one in (*args, *kwargs.values()) if one is not None] == given[1:], name
        assert found is None or [*found], name
