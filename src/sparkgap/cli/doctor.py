# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""sparkgap doctor: will it run here, with what, and why not with something better.

Nothing is loaded and nothing is converted: folders and installed packages are looked
at, and the planner is asked.
"""

import platform
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparkgap.cli.console import out, print_json, table
from sparkgap.cli.loading import find_config, shipped_draft
from sparkgap.cli.options import JsonFlag
from sparkgap.errors import InputError
from sparkgap.version import __version__

if TYPE_CHECKING:
    from sparkgap.config import DraftConfig
    from sparkgap.device import Device

DEFAULT_PRESET = "kimi-k3"
NO_KERNELS = "This version has the definitions in plain torch and no kernels."
NO_PLUGIN = "the plug-in that gives vLLM this drafter does not exist in this version"


def doctor(
    config: Annotated[
        str | None,
        typer.Option(
            help="Preset or checkpoint folder to plan for.",
            show_default=f"the shipped drafter, else {DEFAULT_PRESET}",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Versions, device, what would run each op, and why nothing better does."""
    from sparkgap.bench.provenance import versions
    from sparkgap.device import Device

    installed = {
        "sparkgap": __version__,
        "python": platform.python_version(),
        **versions(),
    }
    device = Device.detect()
    draft = _shipped_draft()
    planned = find_config(config or draft["path"] or DEFAULT_PRESET)
    found = {
        "versions": installed,
        "device": {"kind": device.kind, "description": device.describe()},
        "default_target": _default_target(installed),
        "shipped_drafter": draft,
        "engines": {"vllm": _vllm(installed["vllm"])},
        "config": planned.name,
        "ops": _ops(planned, device),
    }
    if as_json:
        print_json(found)
    else:
        _show(found)


def _shipped_draft() -> dict[str, Any]:
    try:
        return {"found": True, "path": str(shipped_draft()), "help": None}
    except InputError as error:
        return {"found": False, "path": None, "help": str(error)}


def _default_target(installed: dict[str, str | None]) -> dict[str, Any]:
    """Found = its package is there and so is what reads it; no file is opened."""
    from sparkgap.bench.provenance import version
    from sparkgap.speculate.default_target import INSTALL, NAME, PACKAGE, VERSION

    problems = []
    present = version(PACKAGE)
    if present != VERSION:
        seen = f"{PACKAGE} {present}" if present else f"no package {PACKAGE}"
        problems.append(f"{seen}; run: {INSTALL}")
    missing = [
        p for p in ("transformers", "gguf") if not (installed.get(p) or version(p))
    ]
    if missing:
        problems.append(
            f"no package {' or '.join(missing)}; run: pip install 'sparkgap[demo]'"
        )
    return {"found": not problems, "name": NAME, "help": "; ".join(problems) or None}


def _vllm(version: str | None) -> dict[str, Any]:
    return {"found": version is not None, "version": version, "plugin": NO_PLUGIN}


def _ops(config: "DraftConfig", device: "Device") -> list[dict[str, Any]]:
    from sparkgap.plan import plan_config

    return [
        {
            "op": choice.spec.op,
            "use": choice.spec.use,
            "rows": choice.spec.rows,
            "sizes": dict(choice.spec.sizes),
            "implementation": choice.chosen,
            "rejected": [
                {"name": name, "reasons": [reason.text for reason in reasons]}
                for name, reasons in choice.rejected
            ],
        }
        for choice in plan_config(config, device).choices
    ]


def _show(found: dict[str, Any]) -> None:
    console = out()
    console.print(_facts(found))
    console.print()
    ops = table(
        "op",
        "for",
        ">rows",
        "sizes",
        "runs",
        "and not",
        title=f"One draft step of {found['config']}, one request",
    )
    for op in found["ops"]:
        sizes = " ".join(f"{name}={size}" for name, size in op["sizes"].items())
        others = [
            f"{other['name']}: {', '.join(other['reasons'])}"
            for other in op["rejected"]
        ]
        cells = (op["op"], op["use"], f"{op['rows']}", sizes, op["implementation"])
        ops.add_row(*cells, "; ".join(others) or "–")
    console.print(ops)
    console.print(f"\n{NO_KERNELS}")


def _facts(found: dict[str, Any]) -> Any:
    versions, target, draft = (
        found[name] for name in ("versions", "default_target", "shipped_drafter")
    )
    vllm = found["engines"]["vllm"]
    facts = table("", "")
    facts.show_header = False
    for name, version in versions.items():
        facts.add_row(name, version or "not installed")
    facts.add_row("device", found["device"]["description"])
    facts.add_row(
        "default target",
        f"found ({target['name']})" if target["found"] else target["help"],
    )
    facts.add_row("shipped drafter", draft["path"] if draft["found"] else draft["help"])
    state = f"vLLM {vllm['version']}" if vllm["found"] else "vLLM not installed"
    facts.add_row("engines", f"{state}; {vllm['plugin']}")
    return facts
