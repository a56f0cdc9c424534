"""docs/clients.md and the guides say what the tests see."""

import pytest

from tests.clients.cases import CASES, CONTAINERDS, FETCH, INCOMPLETE, render, render_after, render_incomplete
from tests.clients.document import DOCUMENT, commands, configuration, table, with_options
from tests.clients.guide import Guide, Step


def test_the_tables_are_those_of_the_tests() -> None:
    assert table("pull") == render((case.row, case.containerd, case.outcome) for case in CASES)
    assert table("containerd") == render_incomplete(INCOMPLETE)
    assert table("after a lazy pull") == render_after()
    assert f"\n    {FETCH}\n" in DOCUMENT


def test_every_command_is_one_that_a_test_runs() -> None:
    assert commands() == list(dict.fromkeys(case.command for case in CASES))


def test_each_containerd_has_its_configuration() -> None:
    for containerd in CONTAINERDS:
        base, cri = configuration(containerd, cri=False), configuration(containerd, cri=True)
        assert cri.startswith(base) and len(cri) > len(base)
        assert "version =" not in cri
        for case in INCOMPLETE:
            assert case.containerd != containerd or cri.count(case.without) == 1


def test_every_option_is_in_the_guide() -> None:
    text = Guide("node-setup.md").text
    assert with_options(text) == text, "run .venv/bin/python -m tests.clients.document and commit what it changes"


GUIDE = """# G

## One

Text, then `/etc/a.toml`:

`/etc/a.toml`:

```toml
a = 1
```

```sh
# not this
first --flag
second
```

### Inner

```toml
nameless = 1
```

## Two

```sh
third
```
"""


def test_steps_are_files_and_commands_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    guide = Guide("clients.md")
    monkeypatch.setattr(guide, "text", GUIDE)
    assert guide.sections() == ["One", "Two"]
    assert guide.steps("One") == [Step("a = 1\n", "/etc/a.toml"), Step("first --flag"), Step("second")]
    assert guide.steps("Inner") == [] and guide.blocks("Inner", "toml") == ["nameless = 1\n"]
    assert guide.steps("Two") == [Step("third")]
