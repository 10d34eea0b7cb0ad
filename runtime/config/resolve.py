"""Settles every setting, collecting all findings before it refuses.

Precedence: given > manifest > default; a *derived* value follows from other settings or memory.
Nothing is clamped: a value outside its range is SD832, one without effect SD805.
Legend: gamma = num_speculative_tokens.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TypeVar, get_args

import torch

from runtime.config.memory import available_bytes, kv_block_bytes, weight_bytes
from runtime.config.values import (
    DEFAULT_BATCHED_TOKENS,
    DEFAULT_KV_BLOCK_SIZE,
    DEFAULT_MAX_NGRAM,
    DEFAULT_MAX_NUM_REQUESTS,
    DEFAULT_MAX_NUM_WAITING,
    DEFAULT_MEMORY_FRACTION,
    DEFAULT_NUM_SPECULATIVE_TOKENS,
    DEVICE_DTYPES,
    DTYPES,
    ConfigOrigin,
    Overrides,
    ProposerName,
    RuntimeConfig,
)
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose, has_errors
from specctl.contract.manifest import Manifest

_DRAFT_PROPOSERS: frozenset[str] = frozenset({"eagle3"})
_STORED_DTYPES = {"BF16": "bfloat16", "F16": "float16"}
_T = TypeVar("_T")


def resolve_config(
    manifest: Manifest, overrides: Overrides | None = None, *, free_bytes: int | None = None
) -> RuntimeConfig:
    """Settle every setting.

    Args:
        manifest: facts of target and draft.
        overrides: what the user gave.
        free_bytes: memory free on the device before loading; None asks the device.

    Raises:
        DiagnosticError: SD804 (KV budget), SD806 and SD807 (proposer and its width), SD809 (dtype),
            SD830 (device), SD832 (range); every finding of the first stage that has one.
    """
    return _Resolver(manifest, overrides or Overrides(), free_bytes).resolve()


class _Resolver:
    """Works through the settings in the order in which they depend on each other."""

    def __init__(self, manifest: Manifest, given: Overrides, free_bytes: int | None) -> None:
        self._manifest = manifest
        self._given = given
        self._free_bytes = free_bytes
        self._origins: dict[str, ConfigOrigin] = {}
        self._found: list[Diagnostic] = []

    def resolve(self) -> RuntimeConfig:
        self._check_ranges()
        device = self._device()
        dtype = self._dtype(device)
        proposer, gamma = self._proposer()
        self._raise_errors()
        max_num_requests = self._pick("max_num_requests", DEFAULT_MAX_NUM_REQUESTS)
        rows = self._batched_tokens(device, max_num_requests, gamma)
        kv_block_size = self._pick("kv_block_size", DEFAULT_KV_BLOCK_SIZE)
        max_model_len, num_kv_blocks = self._lengths(
            device, dtype, kv_block_size, max_num_requests, with_draft=proposer in _DRAFT_PROPOSERS
        )
        self._check_draft_context(proposer, max_model_len)
        self._raise_errors()
        target = self._manifest.target
        return RuntimeConfig(
            device=device,
            dtype=dtype,
            kv_block_size=kv_block_size,
            num_kv_blocks=num_kv_blocks,
            max_num_requests=max_num_requests,
            max_num_waiting=self._pick("max_num_waiting", DEFAULT_MAX_NUM_WAITING),
            max_num_batched_tokens=rows,
            prefill_chunk_size=self._pick("prefill_chunk_size", rows, origin="derived"),
            max_model_len=max_model_len,
            num_speculative_tokens=gamma,
            draft_width=self._draft_width(proposer, gamma),
            proposer=proposer,
            max_ngram=self._pick("max_ngram", DEFAULT_MAX_NGRAM),
            batch_buckets=self._pick(
                "batch_buckets", self._manifest.graphs.batch_buckets, origin="manifest"
            ),
            enable_prefix_cache=self._pick("enable_prefix_cache", True),
            target_vocab_size=self._note("target_vocab_size", target.vocab_size, "manifest"),
            eos_ids_target=self._note("eos_ids_target", target.eos_token_ids, "manifest"),
            origins=self._origins,
            diagnostics=tuple(self._found),
        )

    def _note(self, name: str, value: _T, origin: ConfigOrigin) -> _T:
        self._origins[name] = origin
        return value

    def _pick(self, name: str, otherwise: _T, *, origin: ConfigOrigin = "default") -> _T:
        """Return what was given for `name`, else `otherwise`, and note which."""
        given: _T | None = getattr(self._given, name)
        if given is None:
            return self._note(name, otherwise, origin)
        return self._note(name, given, "given")

    def _raise_errors(self) -> None:
        if has_errors(self._found):
            raise DiagnosticError(self._found)

    def _refuse(
        self, code: str, name: str, message: str, *, expected: object, found: object
    ) -> None:
        self._found.append(
            diagnose(code, where=_option(name), message=message, expected=expected, found=found)
        )

    def _idle(self, name: str, reason: str) -> None:
        """Warn about a given setting that nothing reads."""
        self._found.append(
            diagnose(
                "SD805",
                where=_option(name),
                message=f"`{name}` has no effect: {reason}",
                found=getattr(self._given, name),
            )
        )

    def _check_ranges(self) -> None:
        for item in fields(Overrides):
            value, low = getattr(self._given, item.name), _LOWEST.get(item.name)
            if value is not None and low is not None and value < low:
                self._refuse(
                    "SD832",
                    item.name,
                    f"`{item.name}` is {value}",
                    expected=f"at least {low}",
                    found=value,
                )
        fraction = self._given.kv_memory_fraction
        if fraction is not None and not 0 < fraction <= 1:
            self._refuse(
                "SD832",
                "kv_memory_fraction",
                f"`kv_memory_fraction` is {fraction}",
                expected="above 0, at most 1",
                found=fraction,
            )
        buckets = self._given.batch_buckets
        if buckets is not None and (not buckets or min(buckets) < 1):
            self._refuse(
                "SD832",
                "batch_buckets",
                "`batch_buckets` lists batch sizes",
                expected="one or more numbers, each at least 1",
                found=buckets,
            )

    def _device(self) -> torch.device:
        name = self._pick("device", "auto")
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if name == "auto":
            return torch.device("cuda", 0) if num_gpus else torch.device("cpu")
        kind, _, index = name.partition(":")
        is_index = index.isdecimal() or not index
        if kind == "cuda" and is_index and int(index or 0) < num_gpus:
            return torch.device("cuda", int(index or 0))
        if name != "cpu":
            self._refuse(
                "SD830",
                "device",
                f"there is no device `{name}`",
                expected=", ".join(["auto", "cpu", *(f"cuda:{i}" for i in range(num_gpus))]),
                found=name,
            )
        return torch.device("cpu")

    def _dtype(self, device: torch.device) -> torch.dtype:
        allowed = DEVICE_DTYPES[device.type]
        stored = _STORED_DTYPES.get(self._manifest.target.dtype)
        if device.type == "cpu" or stored is None:
            name = self._pick("dtype", allowed[0])
        else:
            name = self._pick("dtype", stored, origin="manifest")
        if name in allowed:
            return DTYPES[name]
        self._refuse(
            "SD809",
            "dtype",
            f"`{device.type}` does not run `{name}`",
            expected=" or ".join(allowed),
            found=name,
        )
        return DTYPES[allowed[0]]

    def _proposer(self) -> tuple[ProposerName, int]:
        """Return the proposer and gamma; gamma 0 and `none` imply each other."""
        draft, given = self._manifest.draft, self._given
        name = self._pick(
            "proposer", draft.algorithm if draft is not None else "none", origin="manifest"
        )
        if name not in get_args(ProposerName):
            self._refuse(
                "SD807",
                "proposer",
                f"there is no proposer `{name}` in this version",
                expected=", ".join(get_args(ProposerName)),
                found=name,
            )
            return "none", 0
        if name in _DRAFT_PROPOSERS and (draft is None or draft.algorithm != name):
            self._refuse(
                "SD807",
                "proposer",
                f"proposer `{name}` needs an `{name}` draft",
                expected=f"a manifest whose draft is `{name}`",
                found="no draft" if draft is None else draft.algorithm,
            )
        self._check_idle_draft_settings(name)
        if name == "none":
            return "none", self._note("num_speculative_tokens", 0, "derived")
        gamma = self._gamma()
        if gamma == 0:
            if given.proposer is not None:
                self._idle("proposer", "`num_speculative_tokens` is 0")
            return self._note("proposer", "none", "derived"), 0
        found: ProposerName = next(item for item in get_args(ProposerName) if item == name)
        return found, gamma

    def _check_idle_draft_settings(self, proposer: str) -> None:
        given = self._given
        if given.max_ngram is not None and proposer != "ngram":
            self._idle("max_ngram", f"the proposer is `{proposer}`")
        if given.num_speculative_tokens and proposer == "none":
            self._idle("num_speculative_tokens", "the proposer is `none`")

    def _gamma(self) -> int:
        geometry = self._manifest.geometry
        if geometry.num_speculative_tokens:
            gamma = self._pick(
                "num_speculative_tokens", geometry.num_speculative_tokens, origin="manifest"
            )
        else:
            gamma = self._pick("num_speculative_tokens", DEFAULT_NUM_SPECULATIVE_TOKENS)
        if geometry.draft_block_size is None or self._given.proposer in ("ngram", "oracle"):
            return gamma
        limit = geometry.draft_block_size - (0 if geometry.sample_from_anchor else 1)
        if gamma > limit:
            self._refuse(
                "SD806",
                "num_speculative_tokens",
                f"{gamma} tokens are asked for, a draft block of {geometry.draft_block_size} "
                f"yields {limit}",
                expected=f"at most {limit}",
                found=gamma,
            )
        return gamma

    def _draft_width(self, proposer: ProposerName, gamma: int) -> int:
        geometry = self._manifest.geometry
        if proposer not in _DRAFT_PROPOSERS:
            width = 0
        elif geometry.draft_block_size is None:
            width = 1
        else:
            width = gamma if geometry.sample_from_anchor else gamma + 1
        return self._note("draft_width", width, "derived")

    def _batched_tokens(self, device: torch.device, max_num_requests: int, gamma: int) -> int:
        least = max_num_requests * (gamma + 1)
        rows = self._pick("max_num_batched_tokens", max(DEFAULT_BATCHED_TOKENS[device.type], least))
        if rows < max_num_requests:
            self._refuse(
                "SD832",
                "max_num_batched_tokens",
                f"{rows} rows cannot hold one row of each of {max_num_requests} requests",
                expected=f"at least `max_num_requests`, {max_num_requests}",
                found=rows,
            )
        chunk = self._given.prefill_chunk_size
        if chunk is not None and chunk > rows:
            self._idle("prefill_chunk_size", f"a step has {rows} rows")
        return rows

    def _lengths(
        self,
        device: torch.device,
        dtype: torch.dtype,
        kv_block_size: int,
        max_num_requests: int,
        *,
        with_draft: bool,
    ) -> tuple[int, int]:
        """Return `max_model_len` and `num_kv_blocks` so that one request always fits."""
        known = self._manifest.target.decoder.max_position_embeddings
        wanted = self._pick("max_model_len", known, origin="manifest")
        if wanted > known:
            self._refuse(
                "SD832",
                "max_model_len",
                f"{wanted} positions are asked for, the target has {known}",
                expected=f"at most {known}",
                found=wanted,
            )
        blocks_per_request = -(-wanted // kv_block_size)
        full = 1 + blocks_per_request * max_num_requests  # block 0 pads, see block_manager
        if self._given.num_kv_blocks is not None:
            if self._given.kv_memory_fraction is not None:
                self._idle("kv_memory_fraction", "`num_kv_blocks` is given")
            num_blocks = self._pick("num_kv_blocks", full)
        else:
            affordable = self._affordable_blocks(device, dtype, kv_block_size, with_draft)
            num_blocks = self._note("num_kv_blocks", min(full, affordable), "derived")
        held = max(0, num_blocks - 1) * kv_block_size
        if held >= wanted:
            return wanted, num_blocks
        if self._given.max_model_len is not None or held < 2:
            self._refuse(
                "SD804",
                "max_model_len",
                f"the KV pool holds {held} tokens, one request may need {wanted}",
                expected=f"{blocks_per_request + 1} blocks of {kv_block_size} tokens",
                found=f"{num_blocks} blocks, one of them for padding",
            )
            return wanted, num_blocks
        self._found.append(
            diagnose(
                "SD833",
                where=_option("max_model_len"),
                message=f"`max_model_len` is {held}, the target has {known} positions",
                expected=known,
                found=held,
            )
        )
        return self._note("max_model_len", held, "derived"), num_blocks

    def _affordable_blocks(
        self, device: torch.device, dtype: torch.dtype, kv_block_size: int, with_draft: bool
    ) -> int:
        fraction = self._given.kv_memory_fraction or DEFAULT_MEMORY_FRACTION[device.type]
        free = available_bytes(device) if self._free_bytes is None else self._free_bytes
        weights = weight_bytes(self._manifest, dtype, with_draft=with_draft)
        block = kv_block_bytes(
            self._manifest, dtype, kv_block_size=kv_block_size, with_draft=with_draft
        )
        return max(0, (int(free * fraction) - weights) // block)

    def _check_draft_context(self, proposer: ProposerName, max_model_len: int) -> None:
        draft = self._manifest.draft
        if proposer not in _DRAFT_PROPOSERS or draft is None:
            return
        known = draft.decoder.max_position_embeddings
        if known < max_model_len:
            self._found.append(
                diagnose(
                    "SD808",
                    where="manifest#/draft/decoder/max_position_embeddings",
                    message=f"drafting stops at position {known} of {max_model_len}",
                    expected=f"at least {max_model_len}",
                    found=known,
                )
            )


_LOWEST = {
    "kv_block_size": 1,
    "num_kv_blocks": 2,
    "max_num_requests": 1,
    "max_num_waiting": 0,
    "max_num_batched_tokens": 1,
    "prefill_chunk_size": 1,
    "max_model_len": 2,
    "num_speculative_tokens": 0,
    "max_ngram": 1,
}


def _option(name: str) -> str:
    """Return the command-line spelling of a setting."""
    return "--" + name.replace("_", "-")
