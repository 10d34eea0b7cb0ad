"""Measure what a token map saves: the head of a draft step, and whole rounds at a fixed length.

Correctness first: kept rows must have the bits of the full head, and both arms must give the tokens
of target-only decoding; then times. Weights are random. The rounds run an MTP draft of one layer
whose drafts are replaced so that every round accepts the same number (`--accept`), so the two arms
differ by the rows of the draft's head alone.

    python docs/benchmarks/reduced_head.py head --shape 4096 151936 --shape 2048 248320
    python docs/benchmarks/reduced_head.py rounds --work DIR --dynamic-rows 64 --dynamic-rank 256
    python docs/benchmarks/reduced_head.py tiles --kept 32768 --shape 4096 151936

`tiles` times the fused choice over the reduced head for BLOCK_N, warps and stages, which move no
bit (BLOCK_K is the full head's), and prints the fastest first.

Without a GPU, at sizes that prove the script and measure nothing:

    python docs/benchmarks/reduced_head.py head --device cpu --shape 64 3000 --kept 640 --repeats 3
    python docs/benchmarks/reduced_head.py rounds --device cpu --work DIR --hidden 64 --rows 3000 \
        --kept 640 --layers 2 --requests 2 --tokens 24
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from runtime import kernels
from runtime.config import Overrides
from runtime.engine.llm import LLM
from runtime.engine.request import RequestInput
from runtime.spec.oracle import OracleScript
from specctl.contract.codec import dump_manifest
from specctl.ops.emit_manifest import emit_manifest

HEAD_DIM = 128
SPAN = 20  # calls between two clock reads


def seconds_of(run: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Return the seconds of one call, one sample per repeat; a CUDA graph holds SPAN calls."""
    run()
    if device.type != "cuda":
        samples = []
        for _ in range(repeats):
            start = time.perf_counter()
            run()
            samples.append(time.perf_counter() - start)
        return samples
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(SPAN):
            run()
    samples = []
    for _ in range(repeats):
        begin, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) / 1000 / SPAN)
    return samples


def head_part(
    features: int, rows: int, kept: int, *, device: torch.device, dtype: torch.dtype, repeats: int
) -> None:
    """Check and time the greedy choice over a full head and over a subset of its rows."""
    generator = torch.Generator(device=device).manual_seed(0)
    weight = torch.randn((rows, features), generator=generator, device=device, dtype=dtype)
    ids = torch.randperm(rows, generator=torch.Generator().manual_seed(1))[:kept].sort().values
    ids = ids.to(device)
    reduced = weight[ids]
    for num_rows in (1, 8):
        x = torch.randn((num_rows, features), generator=generator, device=device, dtype=dtype)
        full_logits = kernels.head_logits(x, weight)
        if not torch.equal(kernels.head_logits(x, reduced), full_logits[:, ids]):
            raise SystemExit(f"{features} x {rows}: kept rows have other bits")
        best = kernels.head_argmax(x, reduced)
        if not torch.equal(best[1], full_logits[:, ids].amax(dim=1)):
            raise SystemExit(f"{features} x {rows}: the fused choice has another logit")
        full_s = seconds_of(lambda x=x: kernels.head_argmax(x, weight), device, repeats)  # type: ignore[misc]
        cut_s = seconds_of(lambda x=x: kernels.head_argmax(x, reduced), device, repeats)  # type: ignore[misc]
        named = kernels.NamedRows(
            weight_VD=weight, ids_SE=ids[:64].expand(num_rows, 64).contiguous()
        )
        rows_s = seconds_of(
            lambda x=x, n=named: kernels.head_rows_argmax(x, n),  # type: ignore[misc]
            device,
            repeats,
        )
        times = [statistics.median(samples) * 1e6 for samples in (full_s, cut_s, rows_s)]
        fall, share = times[0] / times[1], rows / kept
        print(
            f"hidden {features}, {rows} -> {kept} rows, M={num_rows}: "
            f"{times[0]:.1f} us -> {times[1]:.1f} us; time falls {fall:.2f}x, rows {share:.2f}x, "
            f"ratio {fall / share:.2f} (aim: 0.80); 64 named rows {times[2]:.1f} us"
        )


def tile_part(
    features: int, rows: int, kept: int, *, device: torch.device, dtype: torch.dtype, repeats: int
) -> None:
    """Time tiles of the fused choice over `kept` rows; a tile with other bits is named and left."""
    from triton.runtime.errors import OutOfResources

    from runtime.kernels.cuda.device import device_arch
    from runtime.kernels.cuda.head import launch_head_argmax
    from runtime.kernels.gemm_table import head_config

    weight = torch.randn((kept, features), device=device, dtype=dtype)
    pinned = head_config(
        kept, features, element_bytes=weight.element_size(), arch=device_arch(device)
    )
    for num_rows in (1, 8):
        x = torch.randn((num_rows, features), device=device, dtype=dtype)
        expected = launch_head_argmax(x, weight)
        found = []
        for block_n, warps, stages in itertools.product((16, 32, 64, 128), (2, 4, 8), (3, 4, 6)):
            config = replace(pinned, block_n=block_n, num_warps=warps, num_stages=stages)
            try:
                got = launch_head_argmax(x, weight, config=config)
            except OutOfResources:
                continue
            if not all(map(torch.equal, got, expected)):
                print(f"other bits: {config}")
                continue
            samples = seconds_of(
                lambda x=x, c=config: launch_head_argmax(x, weight, config=c),  # type: ignore[misc]
                device,
                repeats,
            )
            found.append((statistics.median(samples), config))
        print(f"hidden {features}, {kept} rows (of {rows}), M={num_rows}; pinned: {pinned}")
        for seconds, config in sorted(found, key=lambda entry: entry[0])[:5]:
            print(
                f"  {seconds * 1e6:.2f} us: block_n {config.block_n}, {config.num_warps} warps, "
                f"{config.num_stages} stages"
            )


def write_pair(root: Path, arguments: argparse.Namespace) -> tuple[Path, Path]:
    """Write a random target and an MTP layer for it, DeepSeek's keys; return their directories."""
    hidden, rows, layers = arguments.hidden, arguments.rows, arguments.layers
    head_dim = min(HEAD_DIM, hidden // 2)
    heads = hidden // head_dim
    num_kv_heads = max(1, heads // 4)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": num_kv_heads, "head_dim": head_dim, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 4096,
        "vocab_size": rows, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * std).to(torch.bfloat16)

    def layer(prefix: str) -> dict[str, torch.Tensor]:
        kv = num_kv_heads * head_dim
        shapes = {
            "self_attn.q_proj": (heads * head_dim, hidden), "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, heads * head_dim),
            "mlp.gate_proj": (3 * hidden, hidden), "mlp.up_proj": (3 * hidden, hidden),
            "mlp.down_proj": (hidden, 3 * hidden),
        }  # fmt: skip
        tensors = {
            f"{prefix}{name}.weight": normal(*shape, std=0.5 * shape[1] ** -0.5)
            for name, shape in shapes.items()
        }
        ones = torch.ones(hidden, dtype=torch.bfloat16)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = ones.clone()
        return tensors

    target, draft = root / "target", root / "draft"
    for directory in (target, draft):
        directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        "model.embed_tokens.weight": normal(rows, hidden, std=1.0),
        "lm_head.weight": normal(rows, hidden, std=1.0),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    for index in range(layers):
        tensors |= layer(f"model.layers.{index}.")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    prefix = f"model.layers.{layers}."
    tensors = layer(prefix)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{prefix}{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    tensors[f"{prefix}eh_proj.weight"] = normal(hidden, 2 * hidden, std=(2 * hidden) ** -0.5)
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    config |= {"architectures": ["LlamaForCausalLMNextN"], "num_nextn_predict_layers": 1}
    (draft / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return target, draft


def load(
    arguments: argparse.Namespace,
    name: str,
    token_map: Path | None,
    *,
    dynamic_rows: int | None = None,
    dynamic_rank: int | None = None,
) -> LLM:
    """Emit a manifest of the pair and load it, settings equal in both arms."""
    root = arguments.work
    manifest = emit_manifest(
        str(root / "target"),
        str(root / "draft"),
        manifest_dir=root,
        num_speculative_tokens=arguments.drafts,
        token_map=None if token_map is None else str(token_map),
    )
    path = root / f"{name}.yaml"
    path.write_text(dump_manifest(manifest), encoding="utf-8")
    settings = Overrides(
        device=arguments.device,
        max_num_requests=arguments.requests,
        max_model_len=arguments.tokens + 128,
        num_kv_blocks=(arguments.requests + 1) * (arguments.tokens // 16 + 16),
        enable_prefix_cache=False,
        dynamic_rows=dynamic_rows,
        dynamic_rank=dynamic_rank,
    )
    return LLM.from_manifest(path, settings, needs_tokenizer=False)


def round_part(arguments: argparse.Namespace) -> None:
    """Check and time rounds with the full head and with the map's."""
    if not (arguments.work / "draft" / "config.json").is_file():
        write_pair(arguments.work, arguments)
    ids = torch.randperm(arguments.rows, generator=torch.Generator().manual_seed(1))
    kept = sorted({1, 2, *ids[: arguments.kept - 2].tolist()})
    token_map = arguments.work / "token_map.json"
    token_map.write_text(json.dumps(kept), encoding="utf-8")
    requests = [
        RequestInput(
            request_id=str(index),
            prompt_ids_target=tuple(ids[32 * index : 32 * index + 32].tolist()),
            max_tokens=arguments.tokens,
            ignore_eos=True,
        )
        for index in range(arguments.requests)
    ]
    llms = {"full": load(arguments, "full", None), "map": load(arguments, "map", token_map)}
    if arguments.dynamic_rows or arguments.dynamic_rank:
        llms["map and dynamic rows"] = load(
            arguments,
            "map",
            token_map,
            dynamic_rows=arguments.dynamic_rows,
            dynamic_rank=arguments.dynamic_rank,
        )
    longer = [replace(one, max_tokens=arguments.tokens + arguments.drafts + 1) for one in requests]
    plain = llms["full"].sibling(proposer="none", num_speculative_tokens=0).generate(longer)
    script = OracleScript(
        continuations={answer.request_id: answer.ids_target for answer in plain},
        accept_counts=(arguments.accept,),
    )
    arms = {
        name: llm.sibling(proposer="mtp", num_speculative_tokens=arguments.drafts, script=script)
        for name, llm in llms.items()
    }
    expected = [answer.ids_target[: arguments.tokens] for answer in plain]
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(arguments.repeats + 1):
        for name in list(arms) if repeat % 2 else reversed(list(arms)):
            start = time.perf_counter()
            answers = arms[name].generate(requests)
            elapsed = time.perf_counter() - start
            if [answer.ids_target for answer in answers] != expected:
                raise SystemExit(f"arm {name}: other tokens than the target alone")
            if repeat:  # the first pass warms up
                samples[name].append(elapsed)
    total = arguments.tokens * arguments.requests
    for name, llm in arms.items():
        speeds = sorted(total / seconds for seconds in samples[name])
        print(
            f"{name}: {statistics.median(speeds):.1f} tokens/s ({speeds[0]:.1f}-{speeds[-1]:.1f}), "
            f"accept length {llm.engine.stats().accept_length:.3f}"
        )
    gain = statistics.median(samples["full"]) / statistics.median(samples["map"])
    print(f"equal to target-only in all arms; the map makes {gain:.3f}x (aim: 1.10)")


def main() -> None:
    """Run one of the parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["head", "rounds", "tiles"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", nargs=2, type=int, action="append", metavar=("HIDDEN", "ROWS"))
    parser.add_argument("--kept", type=int, default=32_768, help="rows of the reduced head")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--work", type=Path, help="where the random pair is kept")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=248_320)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--accept", type=int, default=2, help="drafts that every round accepts")
    parser.add_argument("--dynamic-rows", type=int, default=0, help="adds an arm with them")
    parser.add_argument("--dynamic-rank", type=int, default=0)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=256)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.part == "rounds":
        if arguments.work is None:
            parser.error("rounds needs --work")
        arguments.work.mkdir(parents=True, exist_ok=True)
        round_part(arguments)
        return
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    part = tile_part if arguments.part == "tiles" else head_part
    for features, rows in arguments.shape or [(4096, 151_936), (2048, 248_320)]:
        part(features, rows, arguments.kept, device=device, dtype=dtype, repeats=arguments.repeats)


if __name__ == "__main__":
    main()
