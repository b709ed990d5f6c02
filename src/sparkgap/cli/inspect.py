# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""sparkgap inspect: a draft's geometry, its tensors, and what a step of it reads.

A preset is counted from its config, a checkpoint folder also lists the tensors that its
files hold; only their headers are read.
"""

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparkgap.cli.console import out, print_json, table
from sparkgap.cli.loading import find_config
from sparkgap.cli.options import JsonFlag
from sparkgap.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from sparkgap.bench.workloads import Step, Workload
    from sparkgap.config import DraftConfig

LAYOUTS = ("stock", "sparkgap", "sparkgap_w2_once")
# The H200's, as `bench/workloads.py` measured it; here so that --help reads no torch.
BANDWIDTH = 4.5


def inspect(
    draft: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT_OR_PRESET", help="A folder, or say kimi-k3."
        ),
    ],
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    dcp: Annotated[int, typer.Option(help="Ranks that share a cache.")] = 1,
    bandwidth: Annotated[float, typer.Option(help="TB/s of one rank.")] = BANDWIDTH,
    context: Annotated[int, typer.Option(help="Cached tokens of a request.")] = 0,
    requests: Annotated[int, typer.Option(help="Requests of a step.")] = 1,
    as_json: JsonFlag = False,
) -> None:
    """Geometry, tensors, and the bytes that one rank reads in a step.

    In the layout of stock engines (context_proj and W2 on every rank) and in
    ours, with the time that reading takes at least.
    """
    if not 0 < bandwidth < float("inf"):
        raise InputError(f"--bandwidth is {bandwidth}, wanted TB/s above 0")
    from sparkgap.bench.workloads import Step

    config = find_config(draft)
    step = Step(
        requests=requests, context=context, tensor_parallel=tp, context_parallel=dcp
    )
    found = _record(draft, config, step, bandwidth)
    if as_json:
        print_json(found)
    else:
        _show(found)


def _record(
    draft: str, config: "DraftConfig", step: "Step", bandwidth: float
) -> dict[str, Any]:
    """bytes_per_step are the weights'; the floor counts cache and logits too."""
    from sparkgap.bench.workloads import (
        cache_bytes_per_token,
        floor_us,
        parameters,
        workload,
    )

    work = workload(config, step)
    return {
        "name": config.name,
        "source": _source(draft),
        "geometry": asdict(config),
        "parameters": parameters(config),
        "tensors": _tensors(draft, config),
        "step": asdict(step),
        "stages": [asdict(stage) for stage in work.stages],
        "bytes_per_step": _totals(work, weights_only=True),
        "all_bytes_per_step": _totals(work, weights_only=False),
        "bandwidth_tb_per_s": bandwidth,
        "floor_us": {
            layout: floor_us(size, bandwidth)
            for layout, size in _totals(work, weights_only=False).items()
        },
        "cache_bytes_per_token": cache_bytes_per_token(config, step.element_bytes),
    }


def _totals(work: "Workload", weights_only: bool) -> dict[str, int]:
    return {layout: work.total(layout, weights_only=weights_only) for layout in LAYOUTS}


def _source(draft: str) -> str:
    from sparkgap.presets import PRESETS

    return PRESETS[draft].source if draft in PRESETS else str(Path(draft).resolve())


def _tensors(draft: str, config: "DraftConfig") -> list[dict[str, Any]]:
    """What the files hold, if it is what the config asks for; of a preset, that."""
    from sparkgap.checkpoint import check_weights
    from sparkgap.presets import PRESETS
    from sparkgap.safetensors_file import stored_tensors
    from sparkgap.weights import expected_tensors

    if draft in PRESETS:
        shapes = expected_tensors(config)
        return [{"name": name, "shape": list(shape)} for name, shape in shapes.items()]
    check_weights(draft, config)
    return [
        {"name": t.name, "shape": list(t.shape), "dtype": t.dtype, "file": t.file.name}
        for t in stored_tensors(Path(draft))
    ]


def _show(found: dict[str, Any]) -> None:
    console = out()
    console.print(found["name"], style="bold", end="  ", markup=False)
    console.print(found["source"], style="dim", markup=False)
    console.print()
    console.print(_geometry(found))
    console.print()
    console.print(_grouped(found["tensors"]))
    console.print()
    console.print(_stages(found))
    console.print(
        "\nsparkgap, W2 once: where W2's shard stays in the chip's cache after the "
        "first of the drafted tokens."
    )


def _geometry(found: dict[str, Any]) -> "Table":
    g = found["geometry"]
    markov = g["markov"]
    taps = ", ".join(map(str, g["target_layer_ids"]))
    layout = "anchor-first" if g["sample_from_anchor"] else "fill-in"
    causal = "causal" if g["causal"] else "not causal"
    rows = table("", "")
    rows.show_header = False
    for name, value in (
        ("parameters", f"{found['parameters']:,}, the target's embedding included"),
        ("hidden, MLP", f"{g['hidden_size']}, {g['intermediate_size']}"),
        ("layers, heads", f"{g['num_layers']}, {g['num_heads']}"),
        (
            "MLA",
            f"q rank {g['q_lora_rank']}, latent {g['kv_lora_rank']} + "
            f"{g['qk_rope_head_dim']}, heads {g['qk_nope_head_dim']} + "
            f"{g['qk_rope_head_dim']} → {g['v_head_dim']}",
        ),
        ("vocabulary", f"{g['vocab_size']}, drafted from {g['draft_vocab_size']}"),
        ("taps", f"target layers {taps}, {g['target_hidden_size']} wide"),
        ("block", f"{g['block_size']} rows, {layout}, {causal}"),
        (
            "Markov head",
            f"{markov['kind']}, rank {markov['rank']}" if markov else "none",
        ),
        ("confidence", g["confidence"]),
        ("cache", f"{found['cache_bytes_per_token']:,} bytes a token"),
    ):
        rows.add_row(name, value)
    return rows


def _grouped(tensors: list[dict[str, Any]]) -> "Table":
    """One row for the same tensor of all layers."""
    groups: dict[tuple[str, ...], int] = {}
    for tensor in tensors:
        name = re.sub(r"\blayers\.\d+\.", "layers.*.", tensor["name"])
        shape = " × ".join(map(str, tensor["shape"]))
        key = (name, shape, tensor.get("dtype", ""))
        groups[key] = groups.get(key, 0) + 1
    rows = table(f"{len(tensors)} tensors", ">", "shape", "")
    for (name, shape, dtype), count in groups.items():
        rows.add_row(name, f"{count} of" if count > 1 else "", shape, dtype)
    return rows


def _stages(found: dict[str, Any]) -> "Table":
    step = found["step"]
    title = (
        f"One step of {step['requests']} request(s) with {step['context']} tokens of "
        f"context, on one of {step['tensor_parallel']} rank(s); MB"
    )
    rows = table("", ">stock", ">sparkgap", ">sparkgap, W2 once", title=title)
    weights = [stage for stage in found["stages"] if stage["is_weight"]]
    others = [stage for stage in found["stages"] if not stage["is_weight"]]
    for stage in weights:
        rows.add_row(stage["name"], *_megabytes(stage))
    rows.add_row("weights", *_megabytes(found["bytes_per_step"]), style="bold")
    for stage in others:
        rows.add_row(stage["name"], *_megabytes(stage))
    rows.add_row("all", *_megabytes(found["all_bytes_per_step"]), style="bold")
    floors = (f"{found['floor_us'][layout]:.1f} µs" for layout in LAYOUTS)
    rows.add_row(
        f"floor at {found['bandwidth_tb_per_s']:g} TB/s", *floors, style="bold"
    )
    return rows


def _megabytes(sizes: dict[str, int]) -> list[str]:
    return [f"{sizes[layout] / 1e6:,.1f}" for layout in LAYOUTS]
