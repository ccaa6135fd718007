"""How much a request may ask to be looked for after every token."""

from specdec.config import SamplingParams
from specdec.errors import ConfigError, shown

MAX_STOPS = 256
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 4096


def require_stops(params: SamplingParams) -> None:
    """Raise ConfigError for more stop strings, longer ones, or more stop tokens than are looked for."""
    longest = max(map(len, params.stop_strings), default=0)
    if len(params.stop_strings) > MAX_STOPS or longest > MAX_STOP_CHARS:
        raise ConfigError(
            f"stop={shown(params.stop)} has {len(params.stop_strings)} strings, the longest of {longest} characters; "
            f"at most {MAX_STOPS} of {MAX_STOP_CHARS} characters are looked for"
        )
    if len(params.stop_token_ids) > MAX_STOP_TOKENS:
        raise ConfigError(
            f"stop_token_ids has {len(params.stop_token_ids)} ids, and at most {MAX_STOP_TOKENS} are allowed"
        )
