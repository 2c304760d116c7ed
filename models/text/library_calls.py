"""Calls of the `tokenizers` library that a damaged file can break."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pshard.errors import UserError


@contextmanager
def name_failures(what: str) -> Iterator[None]:
    """Whatever the library raises, as a UserError that begins with `what`.

    Its panics are no Exceptions, and write a stack trace to stderr before they are raised: nothing is written there
    meanwhile.
    """
    stderr = None
    try:
        with suppress(OSError):  # there is no stderr
            stderr = os.dup(2)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 2)
            os.close(nowhere)
        yield
    except (UserError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise UserError(f"{what} ({error}); give token ids instead") from None
    finally:
        if stderr is not None:
            os.dup2(stderr, 2)
            os.close(stderr)
