"""Settings with which `huggingface_hub`, and so transformers, cannot be imported or used; and its errors in one line."""

import os
import re
from urllib.parse import urlsplit

from gpt2.errors import InputError, printable
from gpt2.garbage import uncollected


def check_environment() -> None:
    """Raise InputError for a setting with which `huggingface_hub`, and so transformers, cannot be imported or used."""
    names = [name for name in ("HF_ENDPOINT", "HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT") if name in os.environ]
    given = ", ".join(f"{name}={os.environ[name]}" for name in names) or "HF_HOME"
    try:
        with uncollected():  # a half of the time of the client's import
            from huggingface_hub import constants

            if not urlsplit(constants.ENDPOINT).hostname or urlsplit(constants.ENDPOINT).port == 0:
                raise ValueError("an endpoint is https://HOST")
            from huggingface_hub import HfApi, get_token  # noqa: F401 (prints a line for a setting that is refused above)

        if not ((token := get_token() or "").isascii() and token.isprintable()):
            given = "HF_TOKEN, or run `hf auth login`"
            raise ValueError("the token holds characters that no token has")
    except (ValueError, OSError) as error:
        raise InputError(f"the Hub's settings cannot be used ({one_line(error)}): correct or unset {given}") from None


def one_line(error: BaseException) -> str:
    """Return an exception's message as one printable line, or its class name if it has none; without what URLs may hide."""
    text = re.sub(r"(https?://)(?:[^\s/@]*@)?([^\s?'\"]*)(?:\?[^\s'\"]*)?", r"\1\2", " ".join(str(error).split()))
    return printable(text, one_line=True)[:200] or type(error).__name__
