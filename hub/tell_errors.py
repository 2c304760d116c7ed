"""What goes wrong between here and the Hub, in one line with what to do about it."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pshard.errors import UserError


@contextmanager
def tell_errors(repo: str) -> Iterator[None]:
    """Turn errors of the Hub's library, the network and the disk into UserErrors about the repository."""
    from huggingface_hub import errors

    try:
        yield
    except UserError:
        raise
    except errors.OfflineModeIsEnabled:
        raise UserError(
            f"{repo} is not in the Hub's cache ({_cache()}) and offline mode is on; unset HF_HUB_OFFLINE, or copy the "
            "model here and give its path"
        ) from None
    except errors.LocalEntryNotFoundError as error:  # whose cause says why the Hub was not asked
        raise UserError(_explain(repo, error.__cause__ or error)) from None
    except errors.HFValidationError as error:
        raise UserError(f"{repo} is no name of a repository: {error}; it is ORG/NAME, as on its page") from None
    except (errors.HTTPError, OSError) as error:
        raise UserError(_explain(repo, error)) from None


def _cache() -> str:
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)


def _explain(repo: str, error: BaseException) -> str:
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{repo}"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{repo} is gated: accept its terms at {page}, then run hf auth login, or set HF_TOKEN to a token of that "
            "account"
        )
    if isinstance(error, errors.HfHubHTTPError):
        return _explain_status(repo, page, error.response)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the disk of {_cache()} is full; free some space, or set HF_HOME to a folder on another disk"
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return f"{_cache()} cannot be written ({error.strerror}); set HF_HOME to a folder of yours"
    return (
        f"the Hub at {constants.ENDPOINT} cannot be reached for {repo} ({error}); check the network and HF_ENDPOINT, "
        f"or give the path of a model that is here, which {repo} is not"
    )


def _explain_status(repo: str, page: str, response: Any) -> str:
    code, said = response.status_code, response.headers.get("X-Error-Message", "")
    if code == 429:
        wait = response.headers.get("Retry-After", "")
        when = f"in {wait} s" if wait.isdigit() else "in some minutes"
        return f"the Hub takes no more requests from here for now (429); try again {when}; HF_TOKEN raises the limit"
    if "credentials" in said:
        return f"the Hub does not accept the token; log in again with hf auth login, or correct HF_TOKEN ({repo})"
    if code in (401, 404):
        return (
            f"the Hub has no repository or file at {page}, or it is private, and there is no such path here; "
            "check the name, and for a private one set HF_TOKEN or run hf auth login"
        )
    if code == 403:
        return f"the Hub refuses {repo} (403{f', {said}' if said else ''}); see {page} for who may fetch it"
    return f"the Hub answered {code} for {repo}{f' ({said})' if said else ''}; try again later"
