"""Rules of this machine: the libraries and the device that a run needs."""

from transformers.integrations import get_available_reporting_integrations, get_reporting_integration_callbacks
from transformers.utils import is_liger_kernel_available

from ...rollout.vllm.support import check_device, check_returns_kept, check_returns_routing, check_version
from ..given import Given
from .rule import Rule, refusal


# Trackers that transformers may leave out of its list of available ones though they are installed
NOT_LISTED = ("azure_ml", "flyte")


def _missing_trackers(run: Given) -> str:
    given = run.args.report_to
    trackers = {given} if isinstance(given, str) else set(given or ())
    missing = trackers - {"none", "all", *NOT_LISTED, *get_available_reporting_integrations()}
    return ", ".join(map(repr, sorted(missing)))


def _samples_in_vllm(run: Given) -> bool:
    return run.spec.sampler is not None and run.spec.sampler.is_vllm


RULES = (
    Rule(
        ("report_to",),
        when=lambda run: refusal(get_reporting_integration_callbacks, run.args.report_to),
        message="{found}",
        needs="machine",
    ),
    Rule(
        ("report_to",),
        when=_missing_trackers,
        message="`report_to`={args.report_to!r}: {found} cannot be imported. Install it, or leave it out.",
        needs="machine",
        error=ImportError,
    ),
    Rule(
        ("use_liger_kernel",),
        when=lambda run: run.args.use_liger_kernel and not is_liger_kernel_available(),
        message="`use_liger_kernel`=True needs Liger's kernels. Install them: `pip install liger-kernel`.",
        needs="machine",
        error=ImportError,
    ),
    Rule(
        ("use_vllm",),
        when=lambda run: _samples_in_vllm(run) and refusal(check_version, error=ImportError),
        message="{found}",
        needs="machine",
        error=ImportError,
    ),
    Rule(
        ("rollout_precision", "vllm_enable_sleep_mode"),
        when=lambda run: (
            run.spec.sampler is not None
            and run.spec.source == "colocate"
            and refusal(check_device, run.spec.sampled_in, run.args.vllm_enable_sleep_mode)
        ),
        message="{found}",
        needs="machine",
    ),
    Rule(
        ("router_replay",),
        when=lambda run: run.args.router_replay and run.spec.source == "colocate" and refusal(check_returns_routing),
        message="`router_replay`=True: {found}",
        needs="machine",
    ),
    Rule(
        ("truncation_replay",),
        when=lambda run: run.args.truncation_replay and run.spec.source == "colocate" and refusal(check_returns_kept),
        message="`truncation_replay`=True: {found}",
        needs="machine",
    ),
)
