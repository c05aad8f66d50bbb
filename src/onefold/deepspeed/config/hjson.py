"""Read Hjson: JSON as people write it, with comments, without quotes, with commas left out.

    # the whole batch
    train_batch_size: 32
    zero_optimization: {
        stage: 3,                 // a comma may end the line
        offload_optimizer: {device: "cpu"}
    }

A value without quotes is a number, true, false or null, if a comma, a bracket, a comment or the end
of the line follows it. Otherwise it is a text that ends with the line, as Hjson has it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from onefold.reading import parse_json

#: Whitespace and comments: `# ...`, `// ...` and `/* ... */`.
_SPACE = re.compile(r"(?:\s+|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
#: What may follow a number, true, false or null on its line.
_ENDS = re.compile(r"[ \t\r]*(?=,|\}|\]|#|//|/\*|\n|\Z)")
_LITERAL = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'')
_NAME = re.compile(r"[^\s,:\[\]{}\"'#]+")
_LINE = re.compile(r"[^\n]*")


class HjsonError(ValueError):
    """A text is not Hjson.

    Attributes:
        line, column: where, counted from 1.
    """

    def __init__(self, message: str, text: str, position: int) -> None:
        self.line = text.count("\n", 0, position) + 1
        self.column = position - (text.rfind("\n", 0, position) + 1) + 1
        super().__init__(f"{message} in line {self.line}, column {self.column}")


def parsed(text: str, pairs: Callable[[Iterable[tuple[str, Any]]], Any] = dict) -> Any:
    """Return the value of a Hjson text. The braces around an object at the top may be left out.

    Args:
        pairs: makes an object from its (name, value) pairs, as `object_pairs_hook` of `json`.

    Raises:
        HjsonError: the text is not Hjson.
    """
    reader = _Reader(text.removeprefix("\ufeff"), pairs)
    reader.space()
    value = reader.value() if reader.peek() in ("{", "[") else reader.members("")
    reader.space()
    if not reader.at_end():
        raise reader.error("there is more behind the end of the object")
    return value


class _Reader:
    def __init__(self, text: str, pairs: Callable[[Iterable[tuple[str, Any]]], Any]) -> None:
        self.text, self.pairs, self.at = text, pairs, 0

    def error(self, message: str) -> HjsonError:
        return HjsonError(message, self.text, self.at)

    def at_end(self) -> bool:
        return self.at >= len(self.text)

    def peek(self, count: int = 1) -> str:
        return self.text[self.at : self.at + count]

    def space(self) -> None:
        match = _SPACE.match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        if self.peek(2) == "/*":
            raise self.error("a comment /* has no end")

    def take(self, pattern: re.Pattern[str]) -> str | None:
        match = pattern.match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        return match.group()

    def members(self, closing: str) -> Any:
        """Read an object up to `closing`, which is taken; "" means up to the end of the text."""
        found = []
        while not self._closed(closing):
            name = self._name()
            self.space()
            if self.peek() != ":":
                raise self.error(f"expected a colon behind {name!r}")
            self.at += 1
            self.space()
            found.append((name, self.value()))
            self._separator()
        return self.pairs(found)

    def value(self) -> Any:
        first = self.peek()
        if first == "{":
            self.at += 1
            return self.members("}")
        if first == "[":
            self.at += 1
            found = []
            while not self._closed("]"):
                found.append(self.value())
                self._separator()
            return found
        if self.peek(3) == "'''":
            return self._block()
        if first in ('"', "'"):
            return self._quoted()
        return self._bare()

    def _closed(self, closing: str) -> bool:
        self.space()
        if self.at_end():
            if closing:
                raise self.error(f"expected {closing!r}, and the text ends")
            return True
        if closing and self.peek() == closing:
            self.at += 1
            return True
        return False

    def _separator(self) -> None:
        self.space()
        if self.peek() == ",":
            self.at += 1

    def _name(self) -> str:
        if self.peek() in ('"', "'"):
            return self._quoted()
        name = self.take(_NAME)
        if name is None:
            raise self.error("expected the name of a key")
        return name

    def _quoted(self) -> str:
        raw = self.take(_QUOTED)
        if raw is None:
            raise self.error("a text in quotes has no end in its line")
        if raw[0] == "'":
            raw = '"' + raw[1:-1].replace("\\'", "'").replace('"', '\\"') + '"'
        try:
            return str(json.loads(raw))
        except json.JSONDecodeError as error:
            raise self.error(f"a text in quotes: {error.msg}") from None

    def _block(self) -> str:
        """Read a text in three quotes, without the indentation of its first line."""
        begin, end = self.at, self.text.find("'''", self.at + 3)
        if end < 0:
            raise self.error("a text in three quotes has no end")
        indent = begin - (self.text.rfind("\n", 0, begin) + 1)
        self.at = end + 3
        lines = self.text[begin + 3 : end].split("\n")
        if not lines[0].strip():
            lines = lines[1:]
        lines = [line[indent:] if not line[:indent].strip() else line.lstrip() for line in lines]
        if lines and not lines[-1].strip():
            lines = lines[:-1]
        return "\n".join(lines)

    def _bare(self) -> Any:
        if self.peek() in (",", ":", "}", "]", ""):
            raise self.error("expected a value")
        begin = self.at
        literal = self.take(_LITERAL)
        if literal is not None and _ENDS.match(self.text, self.at):
            try:
                return parse_json(literal)
            except json.JSONDecodeError as error:
                raise self.error(error.msg) from None
        self.at = begin
        return (self.take(_LINE) or "").strip()
