# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Target against plain transformers, on tiny random models of four architectures.

Logits of a pass over a cache are held against one whole forward without a cache, taps
against transformers' own hidden states. fp32, so that only the order of sums differs.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

transformers = pytest.importorskip("transformers")

from sparkgap.errors import InputError  # noqa: E402
from sparkgap.speculate import decode_plain, packed, target_cache  # noqa: E402
from sparkgap.speculate.target import Target  # noqa: E402

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 600,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(num_key_value_heads=2, **COMMON),
    "tied": lambda: transformers.LlamaConfig(
        num_key_value_heads=1, tie_word_embeddings=True, **COMMON
    ),
    "qwen2": lambda: transformers.Qwen2Config(num_key_value_heads=2, **COMMON),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**COMMON),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=3, n_head=4, n_positions=600
    ),
    "sliding": lambda: transformers.MistralConfig(
        num_key_value_heads=2, sliding_window=8, **COMMON
    ),
}
IDS = torch.randint(0, 97, (600,), generator=torch.Generator().manual_seed(1))


def make(kind):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    return Target(model)


@pytest.fixture(params=CONFIGS, ids=str)
def target(request):
    return make(request.param)


@torch.inference_mode()
def whole(target, ids):
    out = target.model(input_ids=ids[None], use_cache=False, output_hidden_states=True)
    return out.logits[0], [states[0] for states in out.hidden_states]


def close(seen, wanted):
    assert_close(seen, wanted, rtol=1e-4, atol=2e-5 * float(wanted.abs().max()))


def test_prefill_verification_and_crop_equal_one_whole_forward(target):
    sequence = target.open((0, 1))
    ids = IDS[:40].tolist()
    logits, taps = sequence.forward(ids[:10], 1)
    reference, states = whole(target, IDS[:10])
    close(logits, reference[-1:])
    close(taps, torch.stack(states[1:3], dim=1))
    # Eight rows of another text, refused from the third on, then twenty right ones.
    wrong = [*ids[10:13], 5, 6, 7, 8, 9]
    logits, taps = sequence.forward(wrong, 8)
    reference, states = whole(target, torch.tensor(ids[:10] + wrong))
    close(logits, reference[-8:])
    close(taps, torch.stack([s[-8:] for s in states[1:3]], dim=1))
    sequence.crop(13)
    assert sequence.length == 13
    logits, _ = sequence.forward(ids[13:33], 20)
    close(logits, whole(target, IDS[:33])[0][-20:])
    logits, _ = sequence.forward(ids[33:34], 1)
    close(logits, whole(target, IDS[:34])[0][-1:])


def test_the_last_tap_comes_before_the_final_norm(target):
    _, taps = target.open((2,)).forward(IDS[:6].tolist(), 1)
    reached = {}
    handle = target.layers[2].register_forward_hook(
        lambda _module, _arguments, out: reached.update(out=out)
    )
    states = whole(target, IDS[:6])[1]
    handle.remove()
    out = reached["out"][0] if isinstance(reached["out"], tuple) else reached["out"]
    close(taps[:, 0], out.reshape(6, -1))
    assert not torch.allclose(taps[:, 0], states[-1])


def test_the_cache_grows_past_its_first_rows(target):
    sequence = target.open()
    ids = IDS.tolist()
    first = target_cache.FIRST_ROWS
    sequence.forward(ids[: first - 3], 1)
    sequence.forward(ids[first - 3 : first + 5], 8)
    logits, _ = sequence.forward(ids[first + 5 : first + 6], 1)
    close(logits, whole(target, IDS[: first + 6])[0][-1:])


def test_sequences_of_one_target_do_not_disturb_each_other(target):
    one, two = target.open((1,)), target.open((0, 2))
    one.forward(IDS[:5].tolist(), 1)
    two.forward(IDS[100:120].tolist(), 1)
    logits, taps = one.forward(IDS[5:9].tolist(), 4)
    assert taps.shape == (4, 1, 32)
    close(logits, whole(target, IDS[:9])[0][-4:])


def test_taps_leave_no_hooks_behind(target):
    target.open((0, 1, 2)).forward(IDS[:5].tolist(), 1)
    assert not any(layer._forward_hooks for layer in target.layers)


@pytest.mark.filterwarnings("ignore")
def test_plain_decoding_is_transformers_generate(target):
    ids = IDS[:7]
    wanted = target.model.generate(
        ids[None],
        attention_mask=torch.ones(1, 7),
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    plain = list(decode_plain(target, ids.tolist(), max_new_tokens=20))
    assert plain == wanted[0, 7:].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [8, 5])
def test_packed_layers_compute_the_same(dtype, rows):
    torch.manual_seed(0)
    for bias in (True, False):
        plain = torch.nn.Linear(64, 48, bias=bias, dtype=dtype)
        if not packed.can_pack(plain.weight):
            pytest.skip(f"this torch packs no {dtype}")
        layer = packed.PackedLinear(plain, 8)
        layer.repack(rows)
        for count in (1, 5, 8, 40):
            x = torch.randn(1, count, 64, dtype=dtype)
            # One rounding to bf16, or eight bits less of an fp32 sum of 64.
            room = 2**-7 if dtype == torch.bfloat16 else 2**-16
            assert_close(layer(x), plain(x), rtol=room, atol=room)


def test_prepare_packs_once_keeps_the_weights_and_the_text():
    target = make("tied")
    ids = IDS[:9].tolist()
    before = list(decode_plain(target, ids, max_new_tokens=12))
    weights = {name: w.data_ptr() for name, w in target.model.named_parameters()}
    for rows in (8, 8, 5):
        target.prepare(rows)
    assert {n: w.data_ptr() for n, w in target.model.named_parameters()} == weights
    assert target.lm_head.data_ptr() == target.embedding.data_ptr()
    sequence = target.open((0,))
    sequence.forward(ids, 1)
    logits, _ = sequence.forward(before[:5], 5)
    assert logits.argmax(-1).tolist() == before[1:6]


def draft(**other):
    fitting = {
        "name": "draft",
        "target_hidden_size": 32,
        "vocab_size": 97,
        "target_layer_ids": (0, 2),
        "target_num_layers": 3,
    }
    return SimpleNamespace(**fitting | other)


def test_a_draft_that_fits_is_taken():
    make("llama").check_draft(draft())
    make("llama").check_draft(draft(target_num_layers=None))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            {"target_hidden_size": 64},
            "hidden size: the draft wants 64, the target has 32",
        ),
        ({"vocab_size": 96}, "vocabulary: the draft wants 96, the target has 97"),
        (
            {"target_layer_ids": (0, 3)},
            r"tap layers \[3\]: the target has layers 0 to 2",
        ),
        ({"target_num_layers": 30}, "layer count: the draft wants 30"),
    ],
    ids=str,
)
def test_a_draft_of_another_target_is_refused(other, says):
    with pytest.raises(InputError, match=says):
        make("llama").check_draft(draft(**other))


def test_all_mismatches_come_at_once():
    with pytest.raises(InputError, match=r"(?s)hidden.*vocabulary.*tap layers.*train"):
        make("llama").check_draft(
            draft(target_hidden_size=1, vocab_size=2, target_layer_ids=(-1,))
        )


def test_a_model_without_a_list_of_layers_is_refused():
    model = make("llama").model
    model.config.num_hidden_layers = 7
    with pytest.raises(InputError, match=r"ModuleList of 7 .*model.layers \[3\]"):
        Target(model)


def test_a_model_with_a_state_that_cannot_be_cropped_is_refused():
    model = make("llama").model
    model.config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(InputError, match="linear_attention"):
        Target(model)


def test_a_path_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(InputError, match="config.json"):
        Target.from_pretrained(tmp_path)


def test_a_truncated_model_is_refused(tmp_path):
    make("llama").model.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(InputError, match="cannot load the target"):
        Target.from_pretrained(tmp_path)


def test_a_saved_model_is_loaded_in_the_type_asked_for(tmp_path):
    make("llama").model.save_pretrained(tmp_path)
    target = Target.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert target.embedding.dtype == torch.bfloat16
    assert (target.hidden_size, target.vocab_size, target.max_length) == (32, 97, 600)
    # Rope tables stay fp32 whatever the weights are.
    assert target.model.model.rotary_emb.inv_freq.dtype == torch.float32
    logits, taps = target.open((1,)).forward([1, 2, 3], 2)
    assert (logits.dtype, taps.dtype) == (torch.float32, torch.bfloat16)


def test_what_a_sequence_refuses():
    sequence = make("llama").open()
    with pytest.raises(ValueError, match="0 rows"):
        sequence.forward([1, 2], 0)
    with pytest.raises(ValueError, match="cannot crop 0 rows to 3"):
        sequence.crop(3)
    with pytest.raises(InputError, match="tap layers"):
        make("llama").open((0, 3))
