"""A random EAGLE-3 head in the layout of published ones, what it guesses, by transformers' modules, and work for it."""

from __future__ import annotations

import json
import pathlib
import random
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.llama import modeling_llama

from quire import LLM, SamplingParams
from quire.compute.draft import eagle
from quire.compute.draft.drafter import DraftContext, LateContext, Queued

Guess = tuple[list[int], list[int]]
"""Tokens that were known, drafts."""

HEAD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 48,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 48, "vocab_size": 256,
    "draft_vocab_size": 96, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 5e3,
    "torch_dtype": "float32",
}  # fmt: skip


def tensors_of(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random ones; norms are no ones, and the head's ids are spread over the model's."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv, n = config["num_attention_heads"] * d, config["num_key_value_heads"] * d, config["draft_vocab_size"]
    shapes = {
        "fc": (hidden, 3 * hidden), "lm_head": (n, hidden), "norm": (hidden,),
        "midlayer.self_attn.q_proj": (q, 2 * hidden), "midlayer.self_attn.k_proj": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv, 2 * hidden), "midlayer.self_attn.o_proj": (hidden, q),
        "midlayer.mlp.gate_proj": (inner, hidden), "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner), "midlayer.input_layernorm": (hidden,),
        "midlayer.hidden_norm": (hidden,), "midlayer.post_attention_layernorm": (hidden,),
    }  # fmt: skip
    made = {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=generator)
        made[f"{name}.weight"] = value * shape[1] ** -0.5 if len(shape) == 2 else 1 + 0.3 * value
    ids = torch.randperm(config["vocab_size"], generator=generator)[:n].sort().values
    made["d2t"] = ids - torch.arange(n)
    made["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill_(0, ids, True)
    return made


def write(folder: pathlib.Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> pathlib.Path:
    """The checkpoint of a head; changes: of `HEAD`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = HEAD | changes
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors_of(config) if tensors is None else tensors, str(folder / "model.safetensors"))
    return folder


class Oracle:
    """Guesses from scratch: no pages, nothing kept, float32. taps: layers whose inputs the head reads."""

    def __init__(self, model: Any, folder: pathlib.Path, taps: tuple[int, ...]) -> None:
        config = transformers.LlamaConfig(**json.loads((folder / "config.json").read_text()))
        self._tensors = {name: one.float() for name, one in load_file(str(folder / "model.safetensors")).items()}
        self.model, self._taps, self._config = model, taps, config
        self._rotary = modeling_llama.LlamaRotaryEmbedding(config)
        self._mlp = modeling_llama.LlamaMLP(config)
        self._mlp.load_state_dict(
            {
                f"{name}_proj.weight": self._tensors[f"midlayer.mlp.{name}_proj.weight"]
                for name in ("gate", "up", "down")
            }
        )

    @torch.no_grad()
    def features(self, tokens: list[int]) -> torch.Tensor:
        """[length, hidden]."""
        states = self.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return torch.cat([states[tap][0] for tap in self._taps], -1) @ self._tensors["fc.weight"].T

    @torch.no_grad()
    def guess(self, tokens: list[int], n: int) -> list[int]:
        """n tokens behind these."""
        known, found = len(tokens), list(tokens)
        features = self.features(tokens[:-1])
        features = torch.cat((torch.zeros(1, features.shape[1]), features))
        for _ in range(n):
            state = self._layer(torch.tensor(found), features)
            logits = self._norm(state[-1:], "norm") @ self._tensors["lm_head.weight"].T
            best = int(logits.argmax())
            found.append(best + int(self._tensors["d2t"][best]))
            features = torch.cat((features, state[-1:]))
        return found[known:]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self._tensors[f"{name}.weight"], self._config.rms_norm_eps)

    def _layer(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        embedded = self.model.get_input_embeddings()(tokens)
        both = [self._norm(embedded, "midlayer.input_layernorm"), self._norm(features, "midlayer.hidden_norm")]
        x, d = torch.cat(both, -1), self._config.head_dim
        q, k, v = (
            (x @ self._tensors[f"midlayer.self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, d)).transpose(0, 1)[None]
            for name in "qkv"
        )
        q, k = modeling_llama.apply_rotary_pos_emb(q, k, *self._rotary(x[None], torch.arange(len(x))[None]))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1).flatten(1)
        x = features + y @ self._tensors["midlayer.self_attn.o_proj.weight"].T
        return x + self._mlp(self._norm(x, "midlayer.post_attention_layernorm"))


class Guesser(Protocol):
    """An oracle."""

    def guess(self, tokens: list[int], n: int) -> list[int]: ...


def watched(monkeypatch: pytest.MonkeyPatch) -> list[Guess]:
    """Every guess from now on; of a step that follows when the tokens are known on which it stood."""
    guesses: list[Guess] = []
    pending: dict[int, list[tuple[Queued, int]]] = {}
    real = {name: getattr(eagle.EagleDrafter, name) for name in ("open", "guess", "queue", "follow", "learn")}

    def see(contexts: Sequence[DraftContext], found: list[list[int]]) -> None:
        guesses.extend(zip([context.tokens.tolist() for context in contexts], found, strict=True))
        assert [len(one) for one in found] == [context.most for context in contexts]

    def guess(self: Any, contexts: Sequence[DraftContext]) -> list[list[int]]:
        found: list[list[int]] = real["guess"](self, contexts)
        see(contexts, found)
        return found

    def queue(self: Any, contexts: Sequence[DraftContext]) -> Queued | None:
        queued: Queued | None = real["queue"](self, contexts)
        if queued is not None:
            see(contexts, queued.read())
        return queued

    def follow(self: Any, contexts: Sequence[LateContext]) -> Queued | None:
        queued: Queued | None = real["follow"](self, contexts)
        if queued is not None:
            for i, context in enumerate(contexts):
                pending.setdefault(context.slot, []).append((queued, i))
        return queued

    def learn(self: Any, slot: int, tokens: np.ndarray) -> None:
        queued, i = pending[slot].pop(0)
        guesses.append((tokens.tolist(), queued.read()[i]))
        real["learn"](self, slot, tokens)

    def open_slot(self: Any, slot: int, *given: Any) -> None:
        pending[slot] = []
        real["open"](self, slot, *given)

    for name, spy in (("open", open_slot), ("guess", guess), ("queue", queue), ("follow", follow), ("learn", learn)):
        monkeypatch.setattr(eagle.EagleDrafter, name, spy)
    return guesses


def drafting(folder: pathlib.Path, **options: Any) -> LLM:
    """An engine whose sequences verify random numbers of drafts: for some steps all of them some, then some none."""
    defaults: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 192}
    llm = LLM(str(folder), skip_tokenizer_init=True, **defaults | options)
    rng, policy = random.Random(5), llm.engine.scheduler.live.drafts

    def choose(seqs: Sequence[Any], n_rows: int, n_free: int, step: int) -> list[int]:
        lengths, numbers = [], [1, 2, 4, 4] if step % 24 < 16 else [0, 2, 4, 4]
        for _ in seqs:
            lengths.append(min(rng.choice(numbers), n_free - sum(lengths)))
        return lengths

    if policy.most:
        policy.choose = choose
    return llm


def work(llm: LLM) -> list[list[int]]:
    """Prompts of different lengths, shared beginnings, two samples of each, twice."""
    rng = random.Random(1)
    base = [rng.randrange(256) for _ in range(70)]
    prompts = [[*base[:n], n] for n in (1, 17, 33, 48, 70)] + [[5], [9] * 40]
    said = []
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=2, max_tokens=36, ignore_eos=True, n=2)
        outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], params)
        said += [list(one.token_ids) for output in outputs for one in output.outputs]
    return said


def checked(oracle: Guesser, seen: list[Guess], most: int) -> Iterator[bool]:
    """Of most guesses, taken at random: whether one is the oracle's."""
    for known, found in random.Random(3).sample(seen, min(len(seen), most)):
        yield found == oracle.guess(known, len(found))


def wrong(oracle: Guesser, seen: list[Guess], most: int = 100) -> float:
    """Share of most guesses that differs from the oracle's."""
    each = list(checked(oracle, seen, most))
    return each.count(False) / len(each)


def all_right(oracle: Guesser, seen: list[Guess], most: int = 100) -> bool:
    """As `not wrong`, which is known at the first that differs."""
    assert seen
    return all(checked(oracle, seen, most))
