# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""A tiny random target with a byte-level tokenizer, and a random draft for it."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sparkgap.checkpoint import save_checkpoint
from sparkgap.config import DraftConfig
from sparkgap.weights import random_weights

SPECIAL = ("<|start|>", "<|end|>", "<|mask|>")
VOCAB = 256 + len(SPECIAL) + 5  # rows that no token uses, as models have them
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Tiny:
    """Folders of a target and of a draft that fits it."""

    target: Path
    draft: Path

    @property
    def options(self) -> list[str]:
        return ["--target", str(self.target), "--draft", str(self.draft)]


def write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        mask_token=SPECIAL[2],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def write_target(folder: Path, hidden: int = 32, vocab: int = VOCAB) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=512,
            bos_token_id=256,
            eos_token_id=257,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def draft_config(**changes: object) -> dict[str, object]:
    raw = {
        "architectures": ["K3DSparkModel"],
        "model_type": "k3_dspark",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "target_hidden_size": 32,
        "target_num_hidden_layers": 4,
        "num_target_layers": 2,
        "target_layer_ids": [1, 2],
        "block_size": 4,
        "mask_token_id": 258,
        "markov_rank": 4,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return raw | changes


def write_draft(folder: Path, **changes: object) -> Path:
    config = DraftConfig.from_dict(draft_config(**changes), name=folder.name)
    lent = replace(random_weights(config), embedding=None, lm_head=None)
    save_checkpoint(folder, config, lent)
    return folder
