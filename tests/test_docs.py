# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Pages do not point at nothing, and what they show runs."""

from pathlib import Path

import pytest
import torch

import ops_page
from pages import (
    Page,
    broken_links,
    make_targets,
    missing_paths,
    newest_version,
    python,
    unknown_words,
    vocabulary,
    wrong_commands,
)
from sparkgap import DraftConfig
from sparkgap.checkpoint import save_checkpoint
from sparkgap.version import __version__
from sparkgap.weights import random_weights

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)


def read(path: Path) -> Page:
    return Page(path, path.read_text(), ROOT)


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture(scope="module")
def words() -> set[str]:
    return vocabulary(ROOT)


@pytest.fixture(scope="module")
def targets() -> set[str]:
    return make_targets((ROOT / "Makefile").read_text())


@pytest.mark.parametrize("path", PAGES, ids=label)
def test_page(path, words, targets):
    page = read(path)
    assert broken_links(page) == []
    assert missing_paths(page) == []
    assert wrong_commands(page, targets) == []
    assert unknown_words(page, words) == []


def test_pages_are_found():
    assert {"README.md", "docs/architecture.md", "docs/python.md"} <= set(
        map(label, PAGES)
    )


def run(page: Page, **given: object) -> dict[str, object]:
    scope = dict(given)
    exec(compile(python(page), str(page.path), "exec"), scope)
    return scope


def test_the_python_page_runs():
    torch.manual_seed(0)
    scope = run(read(ROOT / "docs" / "python.md"))
    assert scope["drafter"].num_drafts == 7


def small_config() -> DraftConfig:
    """The one that docs/python.md writes out."""
    source = python(read(ROOT / "docs" / "python.md"))
    scope: dict[str, object] = {}
    exec(source[: source.index("from sparkgap import Drafter\n")], scope)
    return scope["config"]


def test_the_readme_runs(tmp_path):
    config = small_config()
    weights = random_weights(config)
    save_checkpoint(tmp_path, config, weights)
    scope = run(
        read(ROOT / "README.md"),
        path=tmp_path,
        embedding=weights.embedding,
        lm_head=weights.lm_head,
        positions=torch.arange(5),
        taps=torch.randn(5, config.num_taps, config.target_hidden_size),
        anchors=torch.tensor([3]),
        anchor_positions=torch.tensor([5]),
        temperatures=torch.tensor([0.0]),
        seeds=torch.tensor([0]),
    )
    assert scope["draft"].tokens.shape == (1, config.num_drafts)


def test_the_ops_page_is_fresh():
    assert ops_page.PAGE.read_text() == ops_page.page(), "run: make docs"


def test_the_changelog_leads_with_this_version():
    assert newest_version((ROOT / "CHANGELOG.md").read_text()) == __version__


BAD = """\
# Title

[a](nowhere.md), [b](#elsewhere), [c](#title), [d](https://example.org)
`src/nowhere.py`, `nowhere.py`, `README.md`, `docs/python.md`
`sparkgap generte`, `sparkgap generate --colour`, `sparkgap generate --seed 1`
`make coffee`, `make test`, `--no-such-option`, `--temperature`
`Draughter.propose`, `Drafter.propose`, `DraftBatch`, `propoes`, `mla_decode`
`Drafter.generate`, `sparkgap.steps`, `sparkgap.speculate`, `sparkgap.step`

```sh
$ sparkgap inspect kimi-k3 --tq 8
PROMPT=x make tset   # a comment
sparkgap doctor --json
```

```python
a = 1
```
"""


def test_the_checks_complain(words, targets):
    page = Page(ROOT / "README.md", BAD, ROOT)
    assert broken_links(page) == [
        "link to nowhere.md: no such file",
        "link to #elsewhere: no such heading",
    ]
    assert missing_paths(page) == [
        "path src/nowhere.py: not in the tree",
        "path nowhere.py: not in the tree",
    ]
    assert wrong_commands(page, targets) == [
        "sparkgap inspect --tq: no such option",
        "make tset: no such target",
        "sparkgap generte: no such command",
        "sparkgap generate --colour: no such option",
        "make coffee: no such target",
    ]
    assert unknown_words(page, words) == [
        "option --no-such-option: no command has it",
        "name Draughter (in `Draughter.propose`): nowhere in the tree",
        "name propoes (in `propoes`): nowhere in the tree",
        "name Drafter.generate: not in the public API",
        "name sparkgap.steps: not in the public API",
    ]


def test_a_block_fails_on_its_own_line():
    page = Page(ROOT / "README.md", BAD.replace("a = 1", "a = 1 / 0"), ROOT)
    with pytest.raises(ZeroDivisionError) as caught:
        run(page)
    line = BAD.splitlines().index("a = 1") + 1
    assert caught.traceback[-1].lineno + 1 == line


def test_an_old_changelog_is_noticed():
    assert newest_version("# Changelog\n\n## 0.0.9\n\n## 0.0.8\n") == "0.0.9"
    assert newest_version("# Changelog\n") == ""
