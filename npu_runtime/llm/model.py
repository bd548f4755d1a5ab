"""``LLM``: a compiled decoder with KV caches and a tokenizer, which continues texts and conversations."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.support.errors import InputError
from npu_compiler.support.numbers import whole_number
from npu_compiler.target_config import target_config

from ..arrays import return_freed_memory
from ..backends.base import Backend, get_backend
from ..executor import Executor
from ..state import State
from ..weight_loader import WeightStore, load_weights
from . import async_greedy, device_top_k, requests
from .async_greedy import AsyncGreedy
from .chat_template import Message, render_chat
from .chunks import Chunk, plan_chunks
from .device_top_k import DeviceTopK
from .entry_runs import entry_runs
from .generation import Generation, TextOutput, Timings, Token
from .kv_snapshot import fingerprint, load_snapshot, save_snapshot
from .manifest import ModelManifest
from .profile import LLMProfile, profile_llm
from .sampling import HostScores, Sampler, SamplingOptions, Scores
from .tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[Message] | np.ndarray


class LLM:
    """A decoder with its weights and the KV caches of one conversation in memory. It is not thread-safe.

    Args:
        program: each of its entry points computes N tokens; one of them has N = 1. They take token_ids int64[1, N],
            positions int64[N] and last int64[1] (the index of the token whose logits are wanted) and return logits
            float32[1, vocab]. The caches are program state. ``greedy`` and ``sample`` are optional further entry points
            (see ``llm_graphs``).
        weights: as :class:`Executor` takes them.
        manifest: everything except the tensors.
        backend: None: the one of the program's target.

    Raises:
        ArtifactError: the program's entry points are not those of a language model.
    """

    def __init__(self, program: CompiledProgram, weights: Any, manifest: ModelManifest, backend: Backend | None = None):
        self.program, self.manifest = program, manifest
        self.max_len = manifest.max_len
        self.path = Path()  # where it was loaded from
        self.load_seconds = 0.0
        backend = self._backend = backend or get_backend(program.target)
        self.weights = weights if isinstance(weights, WeightStore) else load_weights(program, weights, backend)
        self.state = State(program, backend, self.weights.state)
        self._runs = entry_runs(program, self.weights, backend, self.state)
        self._async_greedy = None
        if async_greedy.ENTRY in program.entries:
            executor = Executor(program, self.weights, backend, async_greedy.ENTRY, self.state)
            self._async_greedy = AsyncGreedy(executor)
        self.vocab = self._runs[1].vocab
        self._floor = target_config(program.target).chunk_floor
        self._tokenizer: Tokenizer | None = None
        self._tokens: list[int] = []  # tokens whose keys and values are in the caches
        self._aligned = 0  # of these, how many leading ones were computed in whole chunks of the largest size
        self._generations = 0  # only the latest one may continue
        self._identity: bytes | None = None

    @classmethod
    def load(
        cls,
        model: str | os.PathLike[str],
        *,
        target: str = "cpu",
        dtype: Any = None,
        max_len: int | None = None,
        threads: int | None = None,
        cache: bool = True,
        weights: str | None = "auto",
        speed_over_memory: bool = False,
        kv_cache: str | None = None,
        activations: str | None = "auto",
    ) -> LLM:
        """Open a model, compile it if the cache does not have the program, and load its weights.

        Args:
            model: a directory with config.json, safetensors and tokenizer.json; a GGUF file; a ``.npubin`` written by
                ``npusim compile``; the name of a built-in model; or an id on the Hugging Face hub, if
                ``huggingface_hub`` is installed.
            target: a name of ``TARGETS``.
            dtype: storage dtype of weights, activations and caches ('float32', 'bfloat16', 'float16'); None: the
                model's own.
            max_len: tokens that prompt and answer may have together; None: what the model was trained for, at most
                4096.
            threads: of the CPU backend; None: ``NPU_NUM_THREADS``, else the cores that this process may use.
            cache: keep the compiled program and the packed weights on disk (in ``NPU_CACHE_DIR``, bounded by
                ``NPU_CACHE_SIZE`` and ``NPU_WEIGHT_CACHE_SIZE``), so that the next start neither compiles nor packs.
            weights: the format in which the matrices of a checkpoint are stored (see :func:`npu_compiler.compile`).
                'auto' changes no number: matrices that a GGUF file or a quantised checkpoint holds in blocks stay in
                them if the target reads them, and all others are in bf16c12. Weights whose values do not fit it are
                stored as they are.
            speed_over_memory: on GPUs, prompts decode weights in a format in every run; True: the elements are stored
                as well, so that prompts are faster.
            kv_cache: 'int8', 'fp8': the caches hold 8-bit integers or floats (float8_e4m3fn) with a scale for each row,
                about half the bytes of bfloat16, with the error that ``npusim perplexity --kv-cache`` measures. None:
                numbers of ``dtype``.
            activations: 'fp8': in products of several rows (prompts) by matrices in an fp8 format, each row is rounded
                to float8_e4m3fn with a scale of its own, with the error that ``npusim perplexity --activations fp8``
                measures. 'auto': if a checkpoint says so and the target multiplies such rows (Hopper GPUs). None: no.

        Raises:
            InputError: there is no such model, or an option does not fit it.
            ConfigError: the model's config is malformed or not supported.
            WeightError: weights are missing, damaged or of another model.
            CompileError, ToolchainError: the program cannot be compiled.
            ArtifactError: a ``.npubin`` or its manifest is damaged.
        """
        from .loader import Loader

        start = time.perf_counter()
        options = {} if threads is None else {"threads": threads}
        backend = get_backend(target, **options)
        loader = Loader(
            target, dtype, max_len, backend, cache, weights, speed_over_memory=speed_over_memory, kv_cache=kv_cache,
            activations=activations,
        )  # fmt: skip
        llm = cls(*loader.load(model), loader.backend)
        llm.path = loader.path
        llm.load_seconds = time.perf_counter() - start
        return llm

    # -- text -------------------------------------------------------------------------------------------------------
    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ``InputError`` if the model has none, or one of another model."""
        if self._tokenizer is None:
            self._tokenizer = self.manifest.open_tokenizer(self.vocab)
            return_freed_memory()  # parsing takes three times as much as the result
        return self._tokenizer

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt: of a text (with the begin token, if the model has one), of messages
        (through the chat template), or of ids, which are checked.

        Raises:
            InputError: the prompt is empty, malformed, or has an id outside of the vocabulary.
        """
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
            if not ids and self.manifest.bos_id is not None:
                ids = [self.manifest.bos_id]
        elif isinstance(prompt, Sequence) and len(prompt) and isinstance(prompt[0], Mapping):
            text = render_chat(self.manifest.chat_template, prompt, self.manifest.special_tokens)  # type: ignore[arg-type]
            ids = self.tokenizer.encode(text, special=False)
        else:
            ids = requests.token_ids(prompt)
        if not ids:
            raise InputError("the prompt is empty")
        worst = max(ids, key=lambda i: i if i >= 0 else self.vocab - i)
        if not 0 <= worst < self.vocab:
            raise InputError(f"token id {worst} is outside of the vocabulary, which has {self.vocab} tokens")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return self.tokenizer.decode(ids)

    # -- generating -------------------------------------------------------------------------------------------------
    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        stop: Iterable[str | int] | str | int | None = (),
        logprobs: bool = False,
        ignore_eos: bool = False,
        stream: bool = True,
    ) -> Generation:
        """Continue a text, a list of token ids or a conversation ([{'role': …, 'content': …}, …]).

        Args:
            max_tokens: None: until the context is full.
            temperature: 0: greedy. For this and the following five see :class:`SamplingOptions`.
            top_k: 0: all tokens.
            top_p: 1: all tokens.
            min_p: 0: all tokens.
            repetition_penalty: 1: none.
            seed: with a seed, equal calls give equal answers, whatever was generated before. The exception is a
                prompt that continues the conversation in the caches: its rounding may differ from a fresh start.
            stop: texts and token ids that end the answer, in addition to the model's own end tokens.
            logprobs: give each token its log-probability.
            ignore_eos: continue after the model's end tokens.
            stream: generate tokens as the result is iterated; False: generate all of them before returning.

        Raises:
            InputError: an argument is invalid, or prompt and ``max_tokens`` do not fit the context. Raised at once,
                not while iterating.
            BackendError: logits are NaN or infinite (while iterating).
        """
        started = time.perf_counter()
        options = SamplingOptions(repetition_penalty, temperature, top_k, top_p, min_p, seed)
        tokens = self.encode(prompt)
        limit = self._checked_limit(len(tokens), max_tokens)
        texts, ends = requests.stops(stop)
        ends |= set() if ignore_eos else set(self.manifest.eos_ids)
        output = TextOutput(self.tokenizer if texts or self.manifest.tokenizer is not None else None, texts)
        timings = Timings(prompt_tokens=len(tokens))
        steps = self._generate(tokens, limit, Sampler(options, self.vocab), ends, output, logprobs, timings, started)
        generation = Generation(steps, timings)
        return generation if stream else generation.run()

    def chat(self, messages: Sequence[Message], **options: Any) -> Generation:
        """Generate the assistant's answer to a conversation, or to one message of the user.

        ``options`` are those of :meth:`generate`, and so are the errors.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if not isinstance(messages, Sequence) or not messages:
            raise InputError("the conversation has no messages")
        return self.generate(messages, **options)

    def _checked_limit(self, prompt: int, max_tokens: int | None) -> int:
        more = self._longer_context()
        if prompt > self.max_len:
            raise InputError(f"the prompt has {prompt} tokens, but the context holds {self.max_len}; shorten it{more}")
        if max_tokens is None:
            return self.max_len + 1
        max_tokens = whole_number("max_tokens", max_tokens, 1)
        if prompt + max_tokens - 1 > self.max_len:  # the last token is never fed back
            raise InputError(
                f"a prompt of {prompt} tokens and max_tokens={max_tokens} do not fit the context, which holds "
                f"{self.max_len}; ask for at most {self.max_len - prompt + 1} tokens{more}"
            )
        return max_tokens

    def _longer_context(self) -> str:
        """Return the end of an error message: how to get a longer context, or why that is impossible."""
        if not self.manifest.limit:
            return ", or load the model with a larger max_len"
        if self.max_len < self.manifest.limit:
            return f", or load the model with a larger max_len (this model was made for {self.manifest.limit})"
        return f" (this model was made for {self.manifest.limit} tokens, so its context cannot be longer)"

    def _generate(
        self, tokens: list[int], limit: int, sampler: Sampler, ends: set[int], output: TextOutput,
        logprobs: bool, timings: Timings, started: float,
    ) -> Generator[Token, None, str]:  # fmt: skip
        self._generations += 1
        generation = self._generations
        sampler.see(tokens)
        clock = time.perf_counter()
        timings.reused_tokens = self._reusable(tokens)
        scores: Scores = HostScores(self._feed(tokens, timings.reused_tokens))
        timings.prefill_seconds = time.perf_counter() - clock
        on_device = self._async_greedy if sampler.greedy and not logprobs else None
        token = sampler(scores)
        while True:
            sampler.see((token,))
            logprob = scores.log_probability(token) if logprobs else None
            timings.generated_tokens += 1
            text = "" if token in ends else output.push(token)
            reason = self._finished(token in ends or output.stopped, timings.generated_tokens, limit)
            text += output.finish() if reason else ""
            now = time.perf_counter()
            if timings.generated_tokens == 1:
                timings.first_token_seconds = now - started
            else:
                timings.decode_seconds += now - clock
            yield Token(token, text, logprob)
            if reason:
                return reason
            if generation != self._generations:
                raise InputError("this generation was interrupted: another one, or a reset, used the caches since")
            clock = time.perf_counter()
            tokens.append(token)
            if on_device is None:
                scores = self._step(tokens, sampler)
                token = sampler(scores)
            else:
                if timings.generated_tokens == 1:
                    on_device.begin(token, len(tokens) - 1)
                more = min(limit - timings.generated_tokens - 1, self.max_len - len(tokens))
                self._tokens.append(token)
                token = on_device.next(more)

    def _step(self, tokens: list[int], sampler: Sampler) -> Scores:
        """Return the scores of the token that follows ``tokens``; only the last of these is not in the caches yet."""
        last = len(tokens) - 1
        if self._device_top_k is None or not sampler.narrow:
            return HostScores(self._feed(tokens, last))
        scores = self._device_top_k(tokens[last], last, sampler.temperature)
        self._tokens.append(tokens[last])
        return scores

    @cached_property
    def _device_top_k(self) -> DeviceTopK | None:
        if device_top_k.ENTRY not in self.program.entries:
            return None
        return DeviceTopK(Executor(self.program, self.weights, self._backend, device_top_k.ENTRY, self.state))

    def _finished(self, stopped: bool, generated: int, limit: int) -> str:
        if stopped:
            return "stop"
        if generated >= limit:
            return "length"
        return "context" if len(self._tokens) >= self.max_len else ""

    # -- the caches -------------------------------------------------------------------------------------------------
    def _reusable(self, tokens: Sequence[int]) -> int:
        """Return the number of leading tokens whose keys and values can be reused from the caches.

        A prompt that continues the cached tokens reuses all of them. Any other prompt reuses whole leading chunks that
        it shares with them, because a fresh start would compute these in the same runs: results then do not depend on
        earlier prompts.
        """
        held, largest = self._tokens, max(self._runs)
        pairs = enumerate(zip(held, tokens, strict=False))
        shared = next((i for i, (a, b) in pairs if a != b), min(len(held), len(tokens)))
        if shared == len(held) < len(tokens):
            return shared
        return min(shared, len(tokens) - 1, self._aligned) // largest * largest

    def _feed(self, tokens: Sequence[int], begin: int) -> np.ndarray:
        """Compute ``tokens`` from position ``begin`` on.

        Returns:
            The logits float32[vocab] that follow the last token, valid until the next call.
        """
        del self._tokens[begin:]
        self._aligned = min(self._aligned, begin)
        largest = max(self._runs)
        logits = np.empty(0, np.float32)
        for chunk in self.chunks(begin, len(tokens)):
            logits = self._runs[chunk.size](tokens[chunk.start : chunk.stop], chunk.start)
            self._tokens[chunk.start :] = tokens[chunk.start : chunk.stop]
            if chunk.start == self._aligned and chunk.stop - chunk.start == largest:
                self._aligned = chunk.stop
        return logits

    def logits(self, tokens: Sequence[int], prompt: int = 1) -> np.ndarray:
        """Return logits for given tokens (teacher forcing) from an empty context: the first ``prompt`` tokens are
        computed as a prompt, the others one by one.

        Returns:
            float32[len(tokens) - prompt + 1, vocab]; row i has the logits that follow ``tokens[: prompt + i]``.

        Raises:
            InputError: the tokens are invalid or do not fit the context.
        """
        ids = self.encode(tokens)
        self._checked_limit(len(ids), None)
        prompt = whole_number("prompt", prompt, 1, len(ids))
        self.forget()
        result = np.empty((len(ids) - prompt + 1, self.vocab), np.float32)
        result[0] = self._feed(ids[:prompt], 0)
        for i in range(prompt, len(ids)):
            result[i - prompt + 1] = self._feed(ids[: i + 1], i)
        return result

    def reset(self) -> None:
        """Start a new conversation and fill the caches with zeros."""
        self.forget()
        self.state.reset()

    def forget(self) -> None:
        """Start a new conversation. The caches keep their contents, which are overwritten before they are read."""
        self._generations += 1
        self._tokens, self._aligned = [], 0

    @property
    def tokens(self) -> list[int]:
        """The tokens in the caches."""
        return list(self._tokens)

    def save_state(self, path: str | os.PathLike[str]) -> None:
        """Write the tokens in the caches with their keys and values to a safetensors file.

        Raises:
            InputError: the file cannot be written.
        """
        save_snapshot(path, self.state, self._tokens, self.max_len, self._fingerprint())

    def load_state(self, path: str | os.PathLike[str]) -> None:
        """Read a file of :meth:`save_state` into the caches; a prompt that begins with its tokens reuses them.

        Raises:
            InputError: the file is damaged, of another model, or too long for this context. The caches are unchanged.
        """
        tokens = load_snapshot(path, self.state, self.max_len, self._fingerprint())
        self.forget()
        self._tokens = tokens

    def _fingerprint(self) -> bytes:
        if self._identity is None:
            self._identity = fingerprint(f"{self.manifest.identity} {self.program.dtype}", self.weights)
        return self._identity

    def chunks(self, begin: int, end: int) -> list[Chunk]:
        """The runs of entry points that compute positions ``begin`` to ``end``."""
        return plan_chunks(begin, end, tuple(self._runs), self.max_len, self._floor)

    def executor(self, size: int) -> Executor:
        """The executor of the entry point for ``size`` tokens, which shares the caches."""
        return self._runs[size].executor

    def profile(self, prompt: int = 128, cache: int = 128, runs: int = 20, warmup: int = 3) -> list[LLMProfile]:
        """Measure each kernel of a prompt of ``prompt`` tokens and of a step of decoding after ``cache`` tokens; see
        :func:`profile_llm`."""
        return profile_llm(self, prompt, cache, runs, warmup)

    def facts(self) -> dict[str, Any]:
        """Return the name, target, dtype, sizes in bytes, chunk sizes and loading time in seconds."""
        return {
            "model": self.manifest.name, "target": self.program.target, "dtype": self.program.dtype,
            "max_len": self.max_len, "vocab": self.vocab, "chunks": sorted(self._runs),
            "weight_bytes": self.weights.nbytes, "cache_bytes": sum(b.size_bytes for b in self.state.values()),
            "load_seconds": self.load_seconds,
        }  # fmt: skip
