"""What goes over the wire: requests and answers as types, and their translation; pure."""

from __future__ import annotations

__all__: list[str] = []
