"""What a check says: its state, what was found, why that matters, and the exact thing to do about it."""

from dataclasses import dataclass
from enum import Enum

__all__ = ["Check", "State", "fail", "ok", "warn"]


class State(Enum):
    """How a check ended. `FAIL`: bootseer does not work, or not lazily. `WARN`: it works, but worse than it could."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of `bootseer doctor`. `why` and `fix` are empty for what is as it should be. A fix may hold lines for a
    file, after a line that says which."""

    name: str
    state: State
    what: str
    why: str = ""
    fix: str = ""

    @property
    def line(self) -> str:
        """All but name and state as one line; a slash where the fix has a line break."""
        because = f": {self.why}" if self.why else ""
        text = f"{self.what}{because}" + (f" | fix: {self.fix}" if self.fix else "")
        return " ".join(text.replace("\n", " / ").split())


def ok(name: str, what: str) -> Check:
    """Nothing to do."""
    return Check(name, State.OK, what)


def warn(name: str, what: str, why: str, fix: str) -> Check:
    """It works, but worse than it could."""
    return Check(name, State.WARN, what, why, fix)


def fail(name: str, what: str, why: str, fix: str) -> Check:
    """It does not work, or not lazily."""
    return Check(name, State.FAIL, what, why, fix)
