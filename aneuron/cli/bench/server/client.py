"""The client of `aneuron bench serve`: streams, and when each of their tokens came.

Comes in: requests, encoded. Goes out: an `Outcome` each, also for those that failed: nothing a
server does raises here. A token costs a read of the socket and one decoded event; what a general
client adds on top would be the larger part of the load.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from aneuron.cli.bench.server.stream import Outcome, StreamReader
from aneuron.cli.http import client
from aneuron.cli.http.client import NoConnection, Target
from aneuron.cli.http.http1 import BadAnswer
from aneuron.cli.http.trouble import REFUSALS, message_of, refused

__all__ = ["Client", "Target"]


class Client(client.Client):
    """Requests for streams to one server, over connections that are kept.

    Args:
        target: where they go.
        timeout_s: for a whole request, connecting included.
    """

    async def models(self) -> list[str]:
        """Return what the server calls its models.

        Raises:
            OSError: it cannot be reached.
            BadAnswer: it does not say.
            ConfigError: it wants a key, or another one.
        """
        status, body = await self.get("/v1/models")
        if status in REFUSALS:
            raise refused(self.target)
        try:
            return [str(card["id"]) for card in msgspec.json.decode(body)["data"]]
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError, KeyError, IndexError):
            said = message_of(body)
            told = f"status {status}" + (f", {said}" if said else "")
            raise BadAnswer(f"GET /v1/models: {told}") from None

    async def ask(self, path: str, body: bytes, *, due_s: float, max_events: int) -> Outcome:
        """Send a request for a stream, read it to its end; whatever happens is in the outcome.

        Args:
            path: of the endpoint.
            body: JSON.
            due_s: when it was to be sent, of `time.perf_counter`.
            max_events: after which the answer is given up.
        """
        head = self.target.head("POST", path)
        request = b"%sContent-Type: application/json\r\nAccept: text/event-stream\r\n" % head
        request = b"%sContent-Length: %d\r\n\r\n%s" % (request, len(body), body)
        reader = StreamReader(max_events)
        outcome = reader.outcome
        outcome.due_s, outcome.sent_s = due_s, time.perf_counter()
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await self.exchange(request, reader)
            reader.close(answer)
        except TimeoutError:
            outcome.error, outcome.detail = "timeout", f"over {self.timeout_s:g} s"
        except BadAnswer as error:
            outcome.error, outcome.detail = "protocol", str(error)
        except NoConnection as error:
            outcome.error, outcome.detail = "connect", str(error)
        except OSError as error:
            outcome.error, outcome.detail = "closed", str(error)
        outcome.end_s = time.perf_counter()
        return outcome
