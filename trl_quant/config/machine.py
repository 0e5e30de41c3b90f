"""The checks of [`preflight`] on this machine: the libraries and the device that a run needs."""

from transformers.utils import is_liger_kernel_available

from ..rollout.vllm.support import check_device, check_version


def check_machine(args) -> None:
    """Raises `ValueError` or `ImportError` if this machine lacks Liger, or its vLLM cannot sample in the precision."""
    if args.use_liger_kernel and not is_liger_kernel_available():
        raise ImportError("`use_liger_kernel`=True needs Liger's kernels. Install them: `pip install liger-kernel`.")
    if args.use_vllm and args.rollout_precision is not None:
        check_version()
        if args.vllm_mode == "colocate":
            check_device(args.rollout_precision, args.vllm_enable_sleep_mode)
