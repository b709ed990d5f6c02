# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The whole recipe: a target in, a K3DSparkModel folder out.

geometry_for  a draft's config for a target     make_corpus  its training data
train         both, the run, the export         record       what reproduces it
"""

import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sparkgap.bench.prompts import HELD_OUT
from sparkgap.checkpoint import save_checkpoint
from sparkgap.config import DraftConfig
from sparkgap.errors import InputError
from sparkgap.speculate.target import Target
from sparkgap.train.corpus import Corpus, CorpusPlan, generate_corpus
from sparkgap.train.evaluate import Acceptance, accepted_length
from sparkgap.train.trainer import HELD_OUT_LENGTH, Trainer, TrainSettings, TrainState
from sparkgap.version import __version__

Progress = Callable[[str, float], None]
# The longest context the draft claims; training sees a few hundred tokens.
MAX_POSITIONS = 8192


@dataclass(frozen=True)
class Geometry:
    """What a user chooses of a draft; head sizes are K3's (512 + 64, 128, 128), so that
    the same kernels and vLLM's K3 class serve it."""

    layers: int = 3
    heads: int = 4
    intermediate: int = 1280
    q_rank: int = 256
    markov_rank: int = 32
    drafts: int = 7
    taps: int = 5


def geometry_for(name: str, target: Target, geometry: Geometry) -> DraftConfig:
    """The config of a draft for a Hugging Face causal model.

    Taps are spread from the third layer to the last but one: the final layer's output
    is what the draft has to guess.
    """
    depth, width = len(target.layers), target.hidden_size
    if depth < geometry.taps + 1:
        raise InputError(
            f"the target has {depth} layers, {geometry.taps} taps need at least "
            f"{geometry.taps + 1}: give fewer --taps"
        )
    first = min(2, depth - 1 - geometry.taps)
    spread = (depth - 2 - first) / max(geometry.taps - 1, 1)
    return DraftConfig.from_dict(
        {
            "architectures": ["K3DSparkModel"],
            "model_type": "k3_dspark",
            "hidden_size": width,
            "intermediate_size": geometry.intermediate,
            "num_hidden_layers": geometry.layers,
            "num_attention_heads": geometry.heads,
            "num_key_value_heads": geometry.heads,
            "q_lora_rank": geometry.q_rank,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "vocab_size": target.vocab_size,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": min(target.max_length, MAX_POSITIONS),
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
            "target_hidden_size": width,
            "target_num_hidden_layers": depth,
            "num_target_layers": geometry.taps,
            "target_layer_ids": [
                first + round(spread * i) for i in range(geometry.taps)
            ],
            "block_size": geometry.drafts,
            "mask_token_id": mask_token(target.tokenizer),
            "is_causal": False,
            "sample_from_anchor": True,
            "markov_rank": geometry.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        },
        name=name,
    )


def mask_token(tokenizer: Any) -> int:
    """A special token that text does not contain; failing that, the end token."""
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    ends = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
    template = tokenizer.chat_template or ""
    added = tokenizer.added_tokens_decoder
    spare = [
        i
        for i, token in sorted(added.items())
        if token.special and i not in ends and token.content not in template
    ]
    return int(spare[-1]) if spare else int(tokenizer.eos_token_id)


def make_corpus(
    folder: Path, target: Target, plan: CorpusPlan, progress: Progress
) -> Corpus:
    """The training corpus: read from `folder` if it holds this plan's, else made."""
    path, note = folder / "corpus.safetensors", folder / "corpus.json"
    device = target.device
    wanted = json.loads(json.dumps(asdict(plan)))
    if path.exists() and note.exists():
        if json.loads(note.read_text()) != wanted:
            raise InputError(
                f"{folder} holds a corpus made with other settings: give those it was "
                "made with (corpus.json), or another --out"
            )
        return Corpus.load(path, device)
    corpus = generate_corpus(target, plan, progress)
    corpus.save(path)
    note.write_text(json.dumps(wanted) + "\n")
    return corpus


def held_out(
    target: Target, temperature: float, of_each_kind: int, progress: Progress
) -> Corpus:
    """The target's answers to held-out prompts of every kind, at one temperature.

    Twice as many conversations as prompts, each with prompts drawn at random.
    """
    prompts = [p for kind in HELD_OUT.values() for p in kind[:of_each_kind]]
    plan = CorpusPlan(
        batches=1,
        rows=2 * len(prompts),
        length=HELD_OUT_LENGTH,
        temperatures=(temperature,),
        seed=1,
    )
    return generate_corpus(
        target,
        plan,
        lambda _stage, share: progress(
            f"answering at temperature {temperature:g}", share
        ),
        prompts,
    )


def evaluate(
    trainer: Trainer, target: Target, progress: Progress
) -> dict[str, Acceptance]:
    """Accepted length on held-out prompts, greedy and at temperature 1."""
    found = {}
    for name, temperature in (("greedy", 0.0), ("temperature 1", 1.0)):
        answers = held_out(target, temperature, trainer.settings.held_out, progress)
        progress(f"measuring acceptance, {name}", 0.0)
        found[name] = accepted_length(
            trainer.draft,
            trainer.view,
            trainer.lm_head,
            answers,
            greedy=temperature == 0,
        )
    return found


def export(
    folder: Path, trainer: Trainer, plan: CorpusPlan, found: dict[str, Acceptance]
) -> None:
    """Write the draft and training.json, the record that reproduces it."""
    corpus = trainer.corpus
    record = {
        "sparkgap": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if corpus.tokens.is_cuda else "cpu",
        "corpus": asdict(plan)
        | {
            "tokens": corpus.tokens.numel(),
            "answer_tokens": int(corpus.natural.sum()),
        },
        "settings": asdict(trainer.settings),
        "history": thinned(trainer.state),
        "held_out": {name: asdict(a) for name, a in found.items()},
    }
    config = replace(trainer.config, name=folder.name)
    save_checkpoint(folder, config, trainer.exported())
    (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n")


def thinned(state: TrainState, rows: int = 60) -> list[list[float]]:
    """About `rows` evenly spaced rows of the loss history, the last included."""
    every = max(1, len(state.history) // rows)
    kept = state.history[::-1][::every][::-1]
    return [[round(value, 4) for value in row] for row in kept]


def train(
    folder: Path,
    target: Target,
    config: DraftConfig,
    plan: CorpusPlan,
    settings: TrainSettings,
    progress: Progress,
) -> dict[str, Acceptance]:
    """Corpus, run, evaluation, export into `folder`; continues what it finds there."""
    folder.mkdir(parents=True, exist_ok=True)
    if target.device.type == "cuda":
        # TF32: weights and sums stay fp32, products run on tensor cores.
        torch.set_float32_matmul_precision("high")
    corpus = make_corpus(folder, target, plan, progress)
    trainer = Trainer(config, target, corpus, settings)
    trainer.resume(folder)
    steps = settings.schedule.steps

    def report(state: TrainState) -> None:
        _, ce, tv, _ = state.history[-1]
        what = f"training  ce {ce:.2f}  accepts {1 - tv:.2f}"
        progress(what, state.step / steps)

    trainer.run(folder, report)
    found = evaluate(trainer, target, progress)
    export(folder, trainer, plan, found)
    return found
