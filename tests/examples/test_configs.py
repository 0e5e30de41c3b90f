"""The accelerate configurations, read by accelerate itself."""

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from places import ROOT


CONFIGS = ROOT / "configs" / "accelerate"
EXPECTED = {
    "cpu": (DistributedType.MULTI_GPU, "no"),
    "single_gpu": (DistributedType.NO, "bf16"),
    "ddp": (DistributedType.MULTI_GPU, "bf16"),
    "fsdp2": (DistributedType.FSDP, "bf16"),
    "zero2": (DistributedType.DEEPSPEED, "bf16"),
    "zero3": (DistributedType.DEEPSPEED, "bf16"),
}


def test_no_configuration_is_untested():
    assert {path.stem for path in CONFIGS.glob("*")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_accelerate_reads_it(name):
    config = load_config_from_file(str(CONFIGS / f"{name}.yaml"))
    assert (config.distributed_type, config.mixed_precision) == EXPECTED[name]
    assert config.use_cpu is (name == "cpu")
    assert (config.num_processes > 1) is (name != "single_gpu")


@pytest.mark.parametrize("name", EXPECTED)
def test_the_launcher_takes_it(name):
    """What the processes would be started with, all keys known and applied."""
    file = str(CONFIGS / f"{name}.yaml")
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", file, "script.py"]))
    assert args.multi_gpu is (name in ("cpu", "ddp"))
    assert args.use_fsdp is (name == "fsdp2")
    assert args.use_deepspeed is name.startswith("zero")
    if name == "fsdp2":
        assert args.fsdp_version == 2 and args.fsdp_reshard_after_forward is True
        assert args.fsdp_auto_wrap_policy == "TRANSFORMER_BASED_WRAP"
        assert args.fsdp_state_dict_type == "FULL_STATE_DICT"
    if name.startswith("zero"):
        assert args.zero_stage == int(name[-1])
        assert args.zero3_init_flag is (name == "zero3")
        assert name == "zero2" or args.zero3_save_16bit_model is True
