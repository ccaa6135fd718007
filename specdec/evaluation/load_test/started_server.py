"""What a server says of itself beside its answers: its models, and its counters of accepted drafts.

The counters are read in Prometheus' text format by vLLM's names, whatever stands in front of the colon; a server that
has none has no acceptance. They count everybody's requests, so between two readings nobody else should ask.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from specdec.errors import ConfigError, SpecDecError, first_line
from specdec.evaluation.load_test.load_client import error_message

DRAFTS = "spec_decode_num_drafts_total"
ACCEPTED = "spec_decode_num_accepted_tokens_total"
BY_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"


def require_httpx() -> None:
    """Before any work: raises ConfigError where no request could be sent."""
    if find_spec("httpx") is None:
        raise ConfigError("--serve needs httpx: pip install 'specdec-runtime[serve]'")


@dataclass(frozen=True, slots=True)
class Acceptance:
    """A server's counters. rounds: drafts (chains or trees) that were verified; by_position: those of which draft i + 1
    was accepted."""

    rounds: float = 0.0
    accepted: float = 0.0
    by_position: dict[int, float] = field(default_factory=dict)

    def since(self, before: "Acceptance") -> "Acceptance":
        positions = {at: count - before.by_position.get(at, 0.0) for at, count in self.by_position.items()}
        return Acceptance(self.rounds - before.rounds, self.accepted - before.accepted, positions)

    @property
    def length(self) -> float:
        """Tokens a round, the bonus included."""
        return 1.0 + self.accepted / self.rounds

    @property
    def per_position(self) -> list[float]:
        """Share of rounds that took the draft at each position."""
        return [self.by_position[at] / self.rounds for at in sorted(self.by_position)]


class Server:
    """A server by its address, with or without /v1 at the end."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"serve={url!r}: an address such as http://127.0.0.1:8000 is wanted")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("the API key has characters that no HTTP header can hold")
        self.url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self.headers: Mapping[str, str] = {} if not api_key else {"Authorization": f"Bearer {api_key}"}

    def first_model(self) -> str:
        """The name of the model that it lists first. Raises SpecDecError where it lists none."""
        import httpx

        where = f"{self.url}/v1/models"
        try:
            response = httpx.get(where, headers=self.headers, timeout=30.0)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise SpecDecError(f"{where} cannot be asked: {first_line(error)}") from error
        if response.status_code != 200:
            raise SpecDecError(f"{where} answers {response.status_code}: {error_message(response.content)}")
        try:
            name = response.json()["data"][0]["id"]
        except (ValueError, LookupError, TypeError) as error:
            raise SpecDecError(f"{where} lists no model; give its name with --model") from error
        return str(name)

    def acceptance(self) -> Acceptance | None:
        """Its counters as they are now; None where it has none."""
        import httpx

        try:
            response = httpx.get(f"{self.url}/metrics", headers=self.headers, timeout=10.0)
        except httpx.HTTPError:
            return None
        return read_acceptance(response.text) if response.status_code == 200 else None


def read_acceptance(text: str) -> Acceptance | None:
    """The counters in a page of metrics, summed over models and engines; None where they are not there."""
    if find_spec("prometheus_client") is None:
        return None
    from prometheus_client.parser import text_string_to_metric_families

    rounds = accepted = None
    positions: dict[int, float] = {}
    try:
        samples: list[Any] = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        for sample in samples:
            name = sample.name.rpartition(":")[2]
            if name == DRAFTS:
                rounds = (rounds or 0.0) + sample.value
            elif name == ACCEPTED:
                accepted = (accepted or 0.0) + sample.value
            elif name == BY_POSITION:
                at = int(sample.labels["position"])
                positions[at] = positions.get(at, 0.0) + sample.value
    except (ValueError, KeyError):  # a page of something else
        return None
    return None if rounds is None or accepted is None else Acceptance(rounds, accepted, positions)
