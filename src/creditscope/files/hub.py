"""Whether the hub answers for a name: one request without retries. Its library would retry a missing network for a
minute. No torch is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from creditscope.errors import CreditscopeError, installed

SECONDS = 5.0
"""Wait for one answer of the hub."""
ASKED = {"model": "config.json", "dataset": "README.md"}
"""Kind of repository -> the file that is asked for."""


@cache
def answers(name: str, kind: str = "model") -> bool:
    """Whether the hub can be reached, asked for owner/name; a repository that it does not have is refused.

    False without a network, and in the library's offline mode.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        get_hf_file_metadata(hf_hub_url(name, ASKED[kind], repo_type=kind), timeout=SECONDS)
    except EntryNotFoundError:
        return True  # the repository is there, without that file
    except (RepositoryNotFoundError, HFValidationError):
        raise CreditscopeError(f"no {kind} {name!r} on the hub, or not for you; check the name, log in with "
                               f"`hf auth login`, or give a local path") from None
    except HfHubHTTPError as error:  # it answered: the loading library has the words for it
        return getattr(error, "response", None) is not None
    except Exception:  # no network: each library of requests has errors of its own
        return False
    return True


def is_cached(name: str) -> bool:
    """Whether a model of the hub was loaded here before."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)


def refuse_missing(name: str) -> None:
    """Raise at once for a model that cannot be loaded: no such file or folder, and not on the hub."""
    path = Path(name)
    if name == "tiny" or path.is_dir():
        return
    if path.suffix == ".gguf":
        if not path.is_file():
            raise CreditscopeError(f"no such GGUF file: {name}")
        return
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise CreditscopeError(f"no model {name!r}: no such folder, and not a hub name of the form owner/name; "
                               f"give tiny, a folder, a .gguf file or owner/name")
    if not installed("huggingface_hub"):
        return  # the loading library is missing too, and is named where it is needed
    if not answers(name) and not is_cached(name):
        raise CreditscopeError(f"no model {name!r}: no such folder, it was not loaded here before, and the hub does "
                               f"not answer; connect to the network, or give a folder or a .gguf file")


@contextlib.contextmanager
def cache_alone() -> Iterator[None]:
    """The hub's libraries read their caches and ask no network."""
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
