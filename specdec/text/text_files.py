"""Reads users' text files. Knows no format."""

from pathlib import Path

from specdec.errors import ConfigError


def read_text_file(path: Path, what: str) -> str:
    """The file in UTF-8. Raises ConfigError, which calls it `what`, for one that is not, or that cannot be read."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"{what} {str(path)!r} cannot be read: {reason}") from None
