"""`Watched`: a server that is sampled, and may go away and come back.

Comes in: a client. Goes out: samples, each with figures against the last one, or with what is
wrong just now. Only the first contact may fail: a wrong address is told at once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aneuron.cli.http.http1 import BadAnswer
from aneuron.cli.http.trouble import REFUSALS, refused, unreachable, words
from aneuron.cli.top.figures import figures
from aneuron.cli.top.page import NotOurs, read_page
from aneuron.errors import ConfigError

if TYPE_CHECKING:
    from aneuron.cli.http.client import Client
    from aneuron.cli.top.figures import Figures
    from aneuron.cli.top.page import Page

__all__ = ["Sample", "Watched"]

_PLAIN = "text/plain;version=0.0.4"
_WORDS = {200: "ok", 503: "unavailable"}


@dataclass(frozen=True, slots=True)
class Sample:
    """What was seen of a server at one time.

    Attributes:
        figures: against the sample before; None at the first after it came back, or while away.
        trouble: why there is none; "" where there is.
        health, ready: "ok", "unavailable", or "status N" where something else answers.
    """

    figures: Figures | None
    trouble: str = ""
    health: str = ""
    ready: str = ""


class _Refused(Exception):
    """The server answers, and will not show its metrics; only another command line helps."""


class Watched:
    """A server, and its last page.

    Args:
        client: to it.
    """

    def __init__(self, client: Client) -> None:
        """Ask nothing yet."""
        self._client = client
        self._last: Page | None = None
        self.url = client.target.url

    async def begin(self) -> None:
        """Take the first page.

        Raises:
            ConfigError: the server cannot be reached, is no aneuron server, wants a key, or has
                no metrics.
        """
        try:
            self._last = await self._page()
        except _Refused as error:
            raise ConfigError(str(error), param="url") from error
        except (BadAnswer, NotOurs) as error:
            raise ConfigError(f"{self.url} is no aneuron server: {error}", param="url") from error
        except OSError as error:  # a timeout is one, too
            raise unreachable(self.url, error) from error

    async def sample(self) -> Sample:
        """Take the next page; a server that is away is no error."""
        before, self._last = self._last, None
        try:
            self._last = after = await self._page()
            health, ready = await self._probe("/health"), await self._probe("/ready")
        except (_Refused, BadAnswer, NotOurs, OSError) as error:
            return Sample(None, f"away: {words(error)}")
        if before is None:
            return Sample(None, "it is back: figures follow", health, ready)
        return Sample(figures(before, after), "", health, ready)

    async def _page(self) -> Page:
        status, body = await self._client.get("/metrics", accept=_PLAIN)
        now_s = time.monotonic()
        if status in REFUSALS:
            raise _Refused(str(refused(self._client.target)))
        if status == 501:
            raise _Refused(f'{self.url} has no metrics: there, pip install "aneuron[metrics]"')
        if status != 200:
            raise NotOurs(f"/metrics has the status {status}")
        return read_page(body.decode("utf-8", "replace"), now_s)

    async def _probe(self, path: str) -> str:
        status, _ = await self._client.get(path)
        return _WORDS.get(status, f"status {status}")
