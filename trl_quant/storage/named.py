"""Looks for a model by its name before anything loads it: on the disk, in the local cache, and last on the hub, once.

transformers asks a hub that cannot be reached six times for each file, with pauses that grow to eight seconds. A name
that was mistyped would be refused only after minutes, with an error about the connection.
"""

from difflib import get_close_matches
from pathlib import Path

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import httpx, validate_repo_id  # httpx2 from version 2 on


SECONDS_TO_ANSWER = 10.0  # seconds that the hub may take to answer
# Files of which each model, adapter or tokenizer in the local cache has one
ONE_OF = ("config.json", "adapter_config.json", "tokenizer_config.json")


def check_named(field: str, name: str, revision: str | None = None) -> None:
    """
    Raises `ValueError` if there is no model, adapter or tokenizer of this name.

    Args:
        field (`str`): The field or option that names it, for the message.
        name (`str`): A directory, or an id on the hub.
        revision (`str`, *optional*): Branch, tag or commit on the hub.
    """
    if Path(name).is_dir():
        return
    try:
        validate_repo_id(name)
        if any(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in ONE_OF):
            return
        HfApi().model_info(name, revision=revision, timeout=SECONDS_TO_ANSWER)
    except GatedRepoError:
        return  # the download says how to get access
    except (HFValidationError, RepositoryNotFoundError, ConnectionError, httpx.ConnectError, httpx.ConnectTimeout) as e:
        fault, similar = str(e).strip().partition("\n")[0].rstrip("."), _similar(Path(name))
        raise ValueError(
            f"`{field}`={name!r} is neither a directory here nor a model on the hub or in its local cache: {fault}."
            + (f" Did you mean {similar!r}?" if similar else "")
        ) from e
    except (HfHubHTTPError, httpx.HTTPError):
        return  # the hub is there, and transformers asks it again


def _similar(path: Path) -> str | None:
    """Returns the directory that is most like a path that does not exist, if there is one beside it."""
    try:
        beside = {entry.name: entry for entry in path.parent.iterdir() if entry.is_dir()}
    except OSError:
        return None
    close = get_close_matches(path.name, beside, n=1)
    return str(beside[close[0]]) if close else None
