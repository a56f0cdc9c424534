"""A guide, as somebody follows it: its sections, and in them files to write and commands to type, word by word.

A block fenced as `sh` is commands, a line each. Any other block is the contents of a file, when the line before it is
the file's name in backquotes and a colon.
"""

import re
from dataclasses import dataclass

from scripts.rig.link import CHECKOUT

__all__ = ["Guide", "Step"]

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"^`([\w./-]+)`:\n\n\Z", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Step:
    """A command, or with `path` the contents of that file."""

    text: str
    path: str = ""


class Guide:
    """The guide docs/`name`."""

    def __init__(self, name: str) -> None:
        self.text = (CHECKOUT / "docs" / name).read_text()

    def sections(self) -> list[str]:
        """The headings of the second level."""
        return [title for level, title, _ in self._headings() if level == 2]

    def section(self, heading: str) -> str:
        """What stands under a heading, with the sections below it."""
        headings = self._headings()
        at = next(number for number, (_, title, _) in enumerate(headings) if title == heading)
        level, _, begin = headings[at]
        end = next((line for deeper, _, line in headings[at + 1 :] if deeper <= level), None)
        return "\n".join(self.text.splitlines()[begin + 1 : end]) + "\n"

    def steps(self, heading: str) -> list[Step]:
        """The files and commands of a section, in order. Blocks of other kinds, without a name, are none."""
        text = self.section(heading)
        steps: list[Step] = []
        for block in _BLOCK.finditer(text):
            name = _NAME.search(text[: block.start()])
            if block[1] == "sh":
                steps += [Step(line) for line in block[2].splitlines() if line and not line.startswith("#")]
            elif name:
                steps.append(Step(block[2], name[1]))
        return steps

    def blocks(self, heading: str, language: str) -> list[str]:
        """The blocks of one language in a section."""
        return [text for kind, text in _BLOCK.findall(self.section(heading)) if kind == language]

    def _headings(self) -> list[tuple[int, str, int]]:
        """Level, title and line of each heading; a comment in a block is none."""
        found, fenced = [], False
        for number, line in enumerate(self.text.splitlines()):
            fenced ^= line.startswith("```")
            heading = re.match(r"(#+) (.*)$", line)
            if heading and not fenced:
                found.append((len(heading[1]), heading[2], number))
        return found
