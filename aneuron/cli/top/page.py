"""A server's `/metrics` page, read: samples by name and labels.

Comes in: the text format of Prometheus. Goes out: a `Page` that can be asked for counters, gauges
and buckets. Pure; needs prometheus-client, whose parser it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["NotOurs", "Page", "read_page"]

_PREFIX = "aneuron_"
_MARK = "engine_open"  # a page of ours has it, whatever state the engine is in


class NotOurs(Exception):
    """The page is none of an aneuron server's."""


@dataclass(frozen=True, slots=True)
class Page:
    """The samples of one scrape.

    Attributes:
        at_s: when it was read.
        samples: values by name, without the prefix `aneuron_`, and then by labels.
    """

    at_s: float
    samples: Mapping[str, Mapping[frozenset[tuple[str, str]], float]]

    def value(self, name: str) -> float:
        """Return the sum over all labels; 0.0 if there is no such sample."""
        return sum(self.samples.get(name, {}).values())

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Return sums by the value of a label."""
        found: dict[str, float] = {}
        for labels, value in self.samples.get(name, {}).items():
            key = dict(labels).get(label, "")
            found[key] = found.get(key, 0.0) + value
        return found

    def buckets(self, name: str) -> dict[float, float]:
        """Return counts by upper bound of a histogram, cumulative, ascending."""
        counts = self.by_label(f"{name}_bucket", "le")
        return dict(sorted((float(bound), count) for bound, count in counts.items()))

    def info(self, name: str) -> dict[str, str]:
        """Return the labels of an info sample; {} if there is none."""
        return next((dict(labels) for labels in self.samples.get(f"{name}_info", {})), {})


def read_page(text: str, at_s: float) -> Page:
    """Return what a page says.

    Args:
        text: in the text format.
        at_s: when it was read.

    Raises:
        NotOurs: it is no such page, or not an aneuron server's.
    """
    samples: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith(_PREFIX):
                    labels = frozenset(sample.labels.items())
                    samples.setdefault(sample.name.removeprefix(_PREFIX), {})[labels] = sample.value
    except (ValueError, IndexError, KeyError, TypeError) as error:  # what the parser raises
        raise NotOurs(f"it is no page of metrics ({error})") from error
    if _MARK not in samples:
        raise NotOurs("it has no metrics of aneuron's")
    return Page(at_s, samples)
