# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Target: a Hugging Face causal model as the loop needs it.

    target = Target.from_pretrained("default")
    sequence = target.open(taps=(2, 8, 15))        # one sequence: its cache and taps
    logits, taps = sequence.forward(ids, 1)        # [1, V] fp32, [n, m, d_t]
    sequence.crop(length)                          # forget the rows behind

It is the model's own forward. Taps are read by hooks on its decoder layers: tap i is
what layer i puts out, residual stream included, before the final norm. The lm_head runs
over the rows asked for and no others. On CPU two things are done to the loaded model,
both exact: grouped attention without copies (`attention.py`) and, from `prepare` on,
packed linear layers (`packed.py`).

Invariant: `sequence.length` rows are in the cache, and the next id stands at that
position.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparkgap.config import DraftConfig
from sparkgap.errors import InputError
from sparkgap.speculate.attention import use_grouped_attention
from sparkgap.speculate.default_target import Progress, default_target
from sparkgap.speculate.packed import pack_linears
from sparkgap.speculate.target_cache import TargetCache

CROPPABLE_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
UNLIMITED = 1 << 30


class Target:
    """A causal model, frozen, with what drafting for it needs to know of it."""

    def __init__(self, model: Any, source: str | Path | None = None) -> None:
        self.model = model.eval().requires_grad_(False)
        self.source = source
        self._text = model.config.get_text_config()
        self.layers = _decoder_layers(model, self._text.num_hidden_layers)
        kinds = set(getattr(self._text, "layer_types", None) or ()) - CROPPABLE_LAYERS
        if kinds:
            raise InputError(
                f"{_name(model)} has layers of kind {', '.join(sorted(kinds))}, whose "
                "state cannot be taken back after a rejection; use a model whose "
                "layers are all attention"
            )
        parameters = inspect.signature(model.forward).parameters
        # Renamed in transformers 5.24, where the old name warns.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._keeps_rows = "logits_to_keep" in parameters
        use_grouped_attention(model)

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path = "default",
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        progress: Progress | None = None,
    ) -> "Target":
        """Load "default", a folder or a hub name.

        progress: told about the default target's one-time conversion. Raises InputError
        when there is no such model or it is not causal.
        """
        from safetensors import SafetensorError

        try:
            from transformers import AutoModelForCausalLM
            from transformers.utils import logging
        except ImportError as error:
            raise InputError(
                "a target needs the package transformers; run: "
                "pip install 'sparkgap[demo]'"
            ) from error
        path = default_target(progress) if str(source) == "default" else source
        bar = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise InputError(
                f"cannot load the target {str(source)!r}: {error}; give a folder with "
                'config.json and safetensors, a hub name, or "default"'
            ) from error
        finally:
            if bar:
                logging.enable_progress_bar()
        return cls(model.to(device), path)

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def embedding(self) -> Tensor:
        """[V, d]; its rows are the vocabulary, also where the tokenizer has fewer."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def lm_head(self) -> Tensor:
        """[V, d]; may be the embedding itself."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    @property
    def hidden_size(self) -> int:
        """d_t, the width of a tap."""
        return int(self._text.hidden_size)

    @property
    def vocab_size(self) -> int:
        return self.embedding.shape[0]

    @property
    def max_length(self) -> int:
        """Positions the model was made for."""
        return int(getattr(self._text, "max_position_embeddings", 0) or UNLIMITED)

    @functools.cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        if self.source is None:
            raise InputError(
                "this target was made from a model alone and has no tokenizer; load it "
                "with Target.from_pretrained"
            )
        try:
            return AutoTokenizer.from_pretrained(self.source)
        except (OSError, ValueError, KeyError) as error:
            raise InputError(
                f"cannot load the tokenizer of {self.source}: {error}; put the model's "
                "tokenizer.json and tokenizer_config.json into its folder"
            ) from error

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every token that ends an answer: config, generation config and tokenizer."""
        found: set[int] = set()
        sources = [self._text, getattr(self.model, "generation_config", None)]
        if self.source is not None:
            sources.append(self.tokenizer)
        for holder in sources:
            ids = getattr(holder, "eos_token_id", None)
            found.update([ids] if isinstance(ids, int) else ids or ())
        return tuple(sorted(found))

    def encode(self, prompt: str, *, chat: bool = True) -> list[int]:
        """Token ids of a prompt, as a user's turn of the chat template or as it is."""
        if not chat:
            return list(self.tokenizer(prompt)["input_ids"])
        if not getattr(self.tokenizer, "chat_template", None):
            raise InputError(
                f"{_name(self.model)} has no chat template; continue raw text instead "
                "(--raw)"
            )
        turns = [{"role": "user", "content": prompt}]
        text = self.tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True
        )
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def check_draft(self, config: DraftConfig) -> None:
        """Raise InputError, with every mismatch, unless the draft fits this target."""
        wanted = {
            "hidden size": (config.target_hidden_size, self.hidden_size),
            "vocabulary": (config.vocab_size, self.vocab_size),
        }
        if config.target_num_layers is not None:
            wanted["layer count"] = (config.target_num_layers, len(self.layers))
        problems = [
            f"{what}: the draft wants {draft}, the target has {target}"
            for what, (draft, target) in wanted.items()
            if draft != target
        ]
        try:
            self._check_taps(config.target_layer_ids)
        except InputError as error:
            problems.append(str(error))
        if problems:
            raise InputError(
                f"{config.name} was not trained for {_name(self.model)}: "
                + "; ".join(problems)
                + "; use the target it was trained for, or train a draft for this one "
                "(sparkgap train)"
            )

    def prepare(self, rows: int) -> None:
        """Make passes of `rows` rows fast (on CPU: pack the linear layers, 0.3 s)."""
        pack_linears(self.model, rows)

    def open(self, taps: Sequence[int] = ()) -> "TargetSequence":
        """A new, empty sequence that reports the outputs of the layers `taps`."""
        self._check_taps(taps)
        return TargetSequence(self, tuple(taps))

    def _check_taps(self, taps: Iterable[int]) -> None:
        wrong = [tap for tap in taps if not 0 <= tap < len(self.layers)]
        if wrong:
            raise InputError(
                f"tap layers {wrong}: the target has layers 0 to {len(self.layers) - 1}"
            )

    def call(self, ids: Tensor, cache: TargetCache, rows: int) -> Tensor:
        """Append ids [B, n] to a cache; logits [B, rows, V] fp32 of the last rows."""
        first, end = cache.rows, cache.rows + ids.shape[1]
        positions = torch.arange(first, end, device=self.device)
        arguments = {self._cache_argument: cache.hf}
        if self._keeps_rows:
            arguments["logits_to_keep"] = rows
        out = self.model(
            input_ids=ids, position_ids=positions[None], use_cache=True, **arguments
        )
        cache.rows = end
        logits: Tensor = out.logits[:, -rows:]
        return logits.float()


class TargetSequence:
    """One sequence in a target: its cache, and hooks on it while a pass runs."""

    def __init__(self, target: Target, taps: tuple[int, ...]) -> None:
        self._target = target
        self._taps = taps
        self._cache = TargetCache(len(target.layers))

    @property
    def length(self) -> int:
        """Rows in the cache, and the position of the next id."""
        return self._cache.rows

    @torch.inference_mode()
    def forward(self, ids: Sequence[int], rows: int) -> tuple[Tensor, Tensor]:
        """Append ids [n]; logits [rows, V] fp32 of the last rows, taps [n, m, d_t]."""
        if not 1 <= rows <= len(ids):
            raise ValueError(f"{rows} rows of logits asked for {len(ids)} ids")
        target, cache = self._target, self._cache
        given = torch.tensor(ids, dtype=torch.int64, device=target.device)
        with _tapped([target.layers[tap] for tap in self._taps]) as outputs:
            logits = target.call(given[None], cache, rows)[0]
        if not self._taps:
            return logits, logits.new_empty(len(ids), 0, target.hidden_size)
        return logits, torch.stack([out[0] for out in outputs], dim=1)

    def crop(self, length: int) -> None:
        """Forget all rows from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop {self.length} rows to {length}")
        self._cache.crop(length)


@contextmanager
def _tapped(layers: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Collects the layers' outputs [1, n, d_t], in the order given, while open."""
    outputs: list[Tensor] = [torch.empty(0)] * len(layers)

    def keep(index: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _arguments: Any, output: Any) -> None:
            outputs[index] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [
        layer.register_forward_hook(keep(index)) for index, layer in enumerate(layers)
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _decoder_layers(model: nn.Module, count: int) -> Sequence[nn.Module]:
    """The list of decoder layers: the outermost ModuleList as long as the config says.

    model.model.layers, model.transformer.h and model.gpt_neox.layers are all found so.
    """
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    ]
    fitting = [
        (name.count("."), module) for name, module in lists if len(module) == count
    ]
    if fitting:
        return list(min(fitting, key=lambda entry: entry[0])[1])
    seen = ", ".join(f"{name} [{len(module)}]" for name, module in lists) or "none"
    raise InputError(
        f"no decoder layers found in {_name(model)}: looked for a ModuleList of "
        f"{count} layers (num_hidden_layers), saw {seen}; this model cannot be tapped"
    )


def _name(model: Any) -> str:
    path = getattr(model.config, "name_or_path", "") or ""
    return Path(path).name or type(model).__name__
