# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""A target and its drafter, loaded for a command; the shipped ones by default."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sparkgap.cli.console import Report
from sparkgap.cli.options import DType
from sparkgap.errors import InputError

if TYPE_CHECKING:
    from sparkgap.config import DraftConfig
    from sparkgap.drafter import Drafter
    from sparkgap.speculate.target import Target

DEMO_PACKAGE = "sparkgap_demo"
DEMO_DRAFT = "smollm2-135m-instruct"
DEMO_INSTALL = "pip install 'sparkgap[demo]'"


def shipped_draft() -> Path:
    """The folder of the drafter that the package sparkgap-demo carries."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for root in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(root) / DEMO_DRAFT
        if folder.is_dir():
            return folder
    raise InputError(
        "the shipped drafter is not installed (package sparkgap-demo); run: "
        f"{DEMO_INSTALL}   or name a drafter with --draft"
    )


def find_config(name: str) -> "DraftConfig":
    """A preset by its name, else a checkpoint folder."""
    from sparkgap.config import DraftConfig
    from sparkgap.presets import PRESETS

    if name in PRESETS:
        return DraftConfig.preset(name)
    if not Path(name).is_dir():
        raise InputError(
            f"{name} is neither a folder nor a preset; presets are {', '.join(PRESETS)}"
        )
    return DraftConfig.from_pretrained(name)


@dataclass(frozen=True)
class Pair:
    """A target and the config of a draft that fits it; `drafter` loads the draft."""

    target: "Target"
    draft: Path
    config: "DraftConfig"

    @classmethod
    def load(
        cls, target: str, draft: Path | None, dtype: DType, report: Report
    ) -> "Pair":
        """The draft's config first: it is read at once, a target takes seconds."""
        folder = draft or shipped_draft()
        report("loading the draft", 0.0)
        from sparkgap.config import DraftConfig
        from sparkgap.speculate.target import Target

        config = DraftConfig.from_pretrained(folder)
        report(f"loading the target {target}", 0.0)
        model = Target.from_pretrained(target, dtype=dtype.torch, progress=report)
        model.check_draft(config)
        return cls(model, folder, config)

    def drafter(self, tokens: int, num_drafts: int | None = None) -> "Drafter":
        """The draft, with a cache for one text of `tokens` tokens.

        A block more, so that the last rounds are as wide as the others.
        """
        from sparkgap.drafter import Drafter

        longest = min(self.config.max_position_embeddings, self.target.max_length)
        return Drafter.from_pretrained(
            self.draft,
            embedding=self.target.embedding,
            lm_head=self.target.lm_head,
            max_requests=1,
            max_model_len=min(longest, tokens + self.config.num_drafts + 1),
            num_drafts=num_drafts,
        )
