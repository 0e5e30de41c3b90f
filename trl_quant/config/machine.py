"""The checks of [`preflight`] on this machine: the libraries and the device that a run needs."""

from transformers.integrations import get_available_reporting_integrations, get_reporting_integration_callbacks
from transformers.utils import is_liger_kernel_available

from ..rollout.vllm.support import check_device, check_version


# Trackers that transformers may leave out of its list of available ones though they are installed
NOT_LISTED = ("azure_ml", "flyte")


def check_machine(args) -> None:
    """
    Raises `ValueError` or `ImportError` if this machine lacks a tracker or Liger, or its vLLM cannot sample in the
    precision.
    """
    get_reporting_integration_callbacks(args.report_to)  # raises `ValueError` for an unknown name
    trackers = [args.report_to] if isinstance(args.report_to, str) else args.report_to or []
    missing = {*trackers} - {"none", "all", *NOT_LISTED, *get_available_reporting_integrations()}
    if missing:
        named = ", ".join(map(repr, sorted(missing)))
        raise ImportError(f"`report_to`={args.report_to!r}: {named} cannot be imported. Install it, or leave it out.")
    if args.use_liger_kernel and not is_liger_kernel_available():
        raise ImportError("`use_liger_kernel`=True needs Liger's kernels. Install them: `pip install liger-kernel`.")
    sampler = args.spec.sampler
    if sampler is not None and sampler.is_vllm:
        check_version()
        if sampler.kind == "colocate":
            check_device(sampler.precision, args.vllm_enable_sleep_mode)
