"""`TemplateParser`: takes answers apart that follow one of our templates.

Comes in: an answer's text, in deltas. Goes out: pieces, as soon as it is sure what they are. It
is a state machine; a state is a method that takes what it can from the buffer and says whether
to go on. What a call consists of is kept until the call is announced, and is plain text if it
never is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aneuron.server.tools.buffer import SPACE, Malformed, TextBuffer
from aneuron.server.tools.pieces import (
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Piece,
    Reasoning,
    make_call_id,
)
from aneuron.server.tools.scanning import ValueScanner
from aneuron.server.tools.templates import THINK, THINK_END

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from aneuron.server.tools.templates import ToolTemplate

__all__ = ["TemplateParser"]

_MAX_SPACE = 16  # that belongs to the tag behind it
_ARGUMENTS = frozenset(("arguments", "parameters"))
_OTHER_KEYS = frozenset(("id", "index", "type"))


class TemplateParser(TextBuffer):
    """An `OutputParser` for a template of ours, for reasoning alone, or for both.

    White space beside a tag (in front of it: 16 characters) goes with the tag.

    Args:
        template: of the calls; None where none are looked for.
        tool_names: a call of any other is plain text.
        reasons: a `<think>` at the very start of the answer opens reasoning.
        begins_in_reasoning: the prompt itself has opened it.
        needs_special_tokens: see `OutputParser`.
    """

    __slots__ = (
        "_drops_space", "_held", "_index", "_is_argument", "_is_open", "_key", "_name", "_pieces",
        "_reasons", "_scanner", "_state", "_template", "_tools", "needs_special_tokens",
    )  # fmt: skip

    def __init__(
        self,
        template: ToolTemplate | None,
        *,
        tool_names: Collection[str] = (),
        reasons: bool = True,
        begins_in_reasoning: bool = False,
        needs_special_tokens: bool = False,
    ) -> None:
        super().__init__()
        self.needs_special_tokens = needs_special_tokens
        self._template = template
        self._tools = frozenset(tool_names)
        self._reasons = reasons and not begins_in_reasoning
        self._state: Callable[[TemplateParser], bool]
        self._state = TemplateParser._reasoning if begins_in_reasoning else TemplateParser._start
        self._drops_space = begins_in_reasoning
        self._pieces: list[Piece] = []
        self._index = 0  # of the call
        self._is_open = False  # it is announced, and has not ended
        self._name: str | None = None
        self._held: list[str] | None = None  # its arguments, until its name is known
        self._key = ""
        self._is_argument = False  # of the value in which the scanner stands
        self._scanner = ValueScanner()

    def feed(self, text: str) -> list[Piece]:
        """Return what the next text of the answer completes."""
        self._buffer += text
        while self._buffer:
            try:
                if not self._state(self):
                    break
            except Malformed:
                self._give_up()
        pieces, self._pieces = self._pieces, []
        return pieces

    def close(self) -> list[Piece]:
        """Return what was held back: text, or the end of a call that was cut off."""
        rest, self._buffer = self._buffer, ""
        if self._kept is not None:
            self._pieces.append(Content("".join(self._kept) + rest))
            self._kept = None
        elif self._is_open:
            self._end_call(is_complete=False)
        elif rest and self._state is TemplateParser._reasoning:
            self._pieces.append(Reasoning(rest))
        elif rest and self._state is not TemplateParser._end:  # else half an end tag
            self._pieces.append(Content(rest))
        self._state = TemplateParser._text
        pieces, self._pieces = self._pieces, []
        return pieces

    # ── text ────────────────────────────────────────────────────────────────────────────

    def _start(self) -> bool:
        """Look whether the answer, or what follows the reasoning, opens with something else."""
        if not self._has_text():
            return False
        body = self._buffer.lstrip(SPACE)
        num_spaces = len(self._buffer) - len(body)
        if num_spaces <= _MAX_SPACE:
            if not body or (self._reasons and len(body) < len(THINK) and THINK.startswith(body)):
                return False
            if self._reasons and body.startswith(THINK):
                self._buffer = body[len(THINK) :]
                self._reasons, self._drops_space = False, True
                self._state = TemplateParser._reasoning
                return True
            if self._template is not None and self._template.is_bare and body[0] == "{":
                self._keep(num_spaces)
                self._state = TemplateParser._object
                return True
        self._state = TemplateParser._text
        return True

    def _reasoning(self) -> bool:
        if not self._has_text():
            return False
        if text := self._take_until(THINK_END):
            self._pieces.append(Reasoning(text))
        if not self._buffer.lstrip(SPACE).startswith(THINK_END):
            return False
        self._buffer = self._buffer.lstrip(SPACE)[len(THINK_END) :]
        self._reasons, self._drops_space = False, True
        self._state = TemplateParser._start
        return True

    def _text(self) -> bool:
        if not self._has_text():
            return False
        if self._template is None:
            self._pieces.append(Content(self._buffer))
            self._buffer = ""
            return False
        begin = self._template.begin
        if text := self._take_until(begin):
            self._pieces.append(Content(text))
        at = self._buffer.find(begin)
        if at < 0:
            return False
        self._keep(at + len(begin))
        self._state = TemplateParser._opening
        return True

    def _has_text(self) -> bool:
        """Drop white space behind a tag; return whether anything is left."""
        if self._drops_space:
            self._buffer = self._buffer.lstrip(SPACE)
            self._drops_space = not self._buffer
        return bool(self._buffer)

    def _take_until(self, tag: str) -> str:
        """Take the text before a tag, before what may become one, and before white space there."""
        text = self._buffer
        at = text.find(tag)
        if at < 0:
            at = text.find(tag[0], max(0, len(text) - len(tag) + 1))
            while at >= 0 and not tag.startswith(text[at:]):
                at = text.find(tag[0], at + 1)
            if at < 0:
                at = len(text)
        lowest = max(0, at - _MAX_SPACE)
        while at > lowest and text[at - 1] in SPACE:
            at -= 1
        self._buffer = text[at:]
        return text[:at]

    # ── calls ───────────────────────────────────────────────────────────────────────────

    def _opening(self) -> bool:
        """Take what opens a list of calls; models also leave it out."""
        assert self._template is not None
        char = self._next_char()
        if char and char == self._template.opens:
            self._take(1)
        if char:
            self._state = TemplateParser._object
        return bool(char)

    def _object(self) -> bool:
        char = self._next_char()
        if char and char != "{":
            raise Malformed
        if char:
            self._take(1)
            self._name, self._held = None, None
            self._state = TemplateParser._member
        return bool(char)

    def _member(self) -> bool:
        char = self._next_char()
        if char == "}":
            return self._close_object()
        key = self._next_string() if char else None
        if key is None:
            return False
        self._key = key
        self._state = TemplateParser._colon
        return True

    def _colon(self) -> bool:
        char = self._next_char()
        if char and char != ":":
            raise Malformed
        if not char:
            return False
        self._take(1)
        self._scanner = ValueScanner()
        self._is_argument = False
        if self._key == "name" and self._name is None:
            self._state = TemplateParser._name_value
        elif self._key in _ARGUMENTS and self._held is None and not self._is_open:
            self._state = TemplateParser._arguments
        elif self._is_open or self._key in _OTHER_KEYS:
            self._state = TemplateParser._value
        else:
            raise Malformed
        return True

    def _name_value(self) -> bool:
        name = self._next_string() if self._next_char() else None
        if name is None:
            return False
        if name not in self._tools:
            raise Malformed
        self._name = name
        if self._held is not None:
            arguments = "".join(self._held)
            self._announce()
            self._pieces.append(CallArguments(self._index, arguments))
        self._state = TemplateParser._comma
        return True

    def _arguments(self) -> bool:
        char = self._next_char()
        if char and char != "{":
            raise Malformed
        if not char:
            return False
        self._is_argument = True
        self._held = []
        if self._name is not None:
            self._announce()
        self._state = TemplateParser._value
        return True

    def _value(self) -> bool:
        """Pass a value on that is arguments, and take any other."""
        stop, is_done = self._scanner.scan(self._buffer, 0, len(self._buffer))
        self._pass_on(stop)
        if is_done:
            self._state = TemplateParser._comma
            return True
        if not self._buffer:
            return False
        assert self._template is not None
        end = self._template.end  # the scanner stopped before a "<"
        if end.startswith(self._buffer) and self._buffer != end:
            return False
        if end and self._buffer.startswith(end):
            raise Malformed
        self._pass_on(1)
        return True

    def _pass_on(self, num_chars: int) -> None:
        if not num_chars:
            return
        text = self._take(num_chars)
        if not self._is_argument:
            return
        if self._is_open:
            self._pieces.append(CallArguments(self._index, text))
        elif self._held is not None:
            self._held.append(text)

    def _comma(self) -> bool:
        char = self._next_char()
        if char == "}":
            return self._close_object()
        if char and char != ",":
            raise Malformed
        if char:
            self._take(1)
            self._state = TemplateParser._member
        return bool(char)

    def _close_object(self) -> bool:
        self._take(1)
        if not self._is_open:
            if self._name is None:
                raise Malformed
            self._announce()  # a tool without parameters
            self._pieces.append(CallArguments(self._index, "{}"))
        self._end_call(is_complete=True)
        self._state = TemplateParser._end
        return True

    def _end(self) -> bool:
        """Take what stands behind a call: the next of a list, or what closes it."""
        assert self._template is not None
        char = self._next_char()
        if not char:
            return False
        if char == self._template.separator:
            self._keep(1)
            self._state = TemplateParser._object
            return True
        if char == self._template.closes:
            self._take(1)
            return True
        end = self._template.end
        if end.startswith(self._buffer) and self._buffer != end:
            return False
        if end and self._buffer.startswith(end):
            self._take(len(end))
        self._state, self._drops_space = TemplateParser._text, True
        return True

    def _announce(self) -> None:
        assert self._template is not None
        assert self._name is not None
        call_id = make_call_id(is_short=self._template.has_short_ids)
        self._pieces.append(CallBegun(self._index, call_id, self._name))
        self._is_open, self._kept = True, None

    def _end_call(self, *, is_complete: bool) -> None:
        self._pieces.append(CallEnded(self._index, is_complete))
        self._is_open = False
        self._index += 1

    def _give_up(self) -> None:
        """Go back to plain text: with all that was kept, or behind a call that breaks off."""
        if self._kept is not None:
            self._pieces.append(Content("".join(self._kept)))
            self._kept = None
        else:
            self._end_call(is_complete=False)
            end = self._template.end if self._template is not None else ""
            if end and self._buffer.startswith(end):
                self._buffer = self._buffer[len(end) :]
            self._drops_space = True
        self._state = TemplateParser._text
