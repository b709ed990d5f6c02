# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The planner: what is chosen, what is not and why, for devices that are not there.

Only the definitions exist, so the order of preference is tested with made-up ones.
"""

from dataclasses import fields, replace

import pytest
import torch

from devices import A100, CPU, H200
from sparkgap import ops
from sparkgap.config import DraftConfig
from sparkgap.errors import InputError
from sparkgap.ops.contract import REFERENCE, Implementation, OpSpec, Reason
from sparkgap.plan import IMPLEMENTATIONS, Workload, op_specs, plan_config
from sparkgap.presets import PRESETS

FP8 = torch.float8_e4m3fn
K3 = DraftConfig.preset("kimi-k3")
SPEC = OpSpec("linear", "lm_head", 7, {"N": 8, "K": 4}, torch.bfloat16, torch.bfloat16)


def _for_hopper(spec, device):
    reasons = []
    if device.capability is None:
        reasons.append(Reason("needs a GPU"))
    elif device.capability < (9, 0):
        reasons.append(Reason(f"capability is {device.capability}, wanted (9, 0)"))
    if spec.rows > 64:
        reasons.append(Reason(f"{spec.rows} rows, measured up to 64"))
    return reasons


FAST = Implementation("fast", _for_hopper)
WITH_FAST = dict.fromkeys(IMPLEMENTATIONS, (FAST, REFERENCE))


@pytest.mark.parametrize("device", [CPU, A100, H200], ids=lambda d: d.name)
@pytest.mark.parametrize("preset", PRESETS)
def test_the_reference_runs_every_op_everywhere(preset, device):
    plan = plan_config(DraftConfig.preset(preset), device)
    assert {choice.chosen for choice in plan.choices} == {"reference"}
    assert all(not choice.rejected for choice in plan.choices)


def test_every_op_of_the_model_can_be_planned():
    assert set(IMPLEMENTATIONS) == {field.name for field in fields(ops.OpSet)}
    assert {spec.op for spec in op_specs(K3, Workload())} == set(IMPLEMENTATIONS)


def test_no_confidence_head_means_no_confidence_op():
    bare = replace(K3, confidence="none")
    assert "confidence" not in {spec.op for spec in op_specs(bare, Workload())}


def test_rows_grow_with_requests():
    rows = {
        requests: {s.use: s.rows for s in op_specs(K3, Workload(requests=requests))}
        for requests in (1, 8)
    }
    assert rows[1]["lm_head"] == 7
    assert rows[1]["context_proj"] == 8
    assert rows[8] == {use: 8 * count for use, count in rows[1].items()}


def test_only_ops_over_the_cache_know_its_dtype():
    specs = op_specs(K3, Workload(cache=FP8))
    over = {spec.op for spec in specs if spec.cache == FP8}
    assert over == {"context_kv", "mla_decode"}
    assert all(spec.cache in (None, FP8) for spec in specs)


def test_the_most_specialised_usable_one_is_chosen():
    plan = plan_config(K3, H200, implementations=WITH_FAST)
    assert {choice.chosen for choice in plan.choices} == {"fast"}


def test_every_reason_is_kept_not_only_the_first():
    plan = plan_config(K3, A100, Workload(requests=16), implementations=WITH_FAST)
    choice = next(c for c in plan.choices if c.spec.use == "lm_head")
    assert choice.chosen == "reference"
    assert choice.rejected == (
        (
            "fast",
            (
                Reason("capability is (8, 0), wanted (9, 0)"),
                Reason("112 rows, measured up to 64"),
            ),
        ),
    )


def test_beyond_its_range_an_op_falls_back_alone():
    plan = plan_config(K3, H200, Workload(requests=9), implementations=WITH_FAST)
    chosen = {choice.spec.use: choice.chosen for choice in plan.choices}
    assert chosen["lm_head"] == "fast"
    assert chosen["context_proj"] == "reference"  # 72 rows


def test_the_plan_is_a_function_of_its_arguments():
    assert plan_config(K3, H200) == plan_config(K3, replace(H200))


def test_nothing_usable_is_one_error_with_every_op():
    with pytest.raises(InputError) as error:
        plan_config(K3, CPU, Workload(weight=FP8))
    text = str(error.value)
    assert text.count("weights are float8_e4m3fn, wanted float32, bfloat16") == len(
        op_specs(K3, Workload())
    )
    assert CPU.name in text


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("cache", [None, torch.float32, torch.bfloat16, FP8], ids=str)
def test_the_reference_takes_what_torch_multiplies(dtype, cache):
    spec = replace(SPEC, activation=dtype, weight=dtype, cache=cache)
    assert REFERENCE.reasons_against(spec, CPU) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weight": FP8}, "weights are float8_e4m3fn"),
        ({"activation": torch.float32}, "activations are float32, weights bfloat16"),
        ({"cache": torch.int8}, "the cache is int8"),
        ({"cache": torch.float8_e5m2}, "the cache is float8_e5m2"),
    ],
    ids=str,
)
def test_the_reference_says_what_it_cannot(changes, said):
    (reason,) = REFERENCE.reasons_against(replace(SPEC, **changes), CPU)
    assert reason.text.startswith(said)
    assert "wanted" in reason.text
