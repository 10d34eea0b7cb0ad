"""Options that `generate`, `serve` and `bench` share: one spelling, range and help for each."""

from __future__ import annotations

from typing import Annotated

import typer

Device = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda or cuda:<index>.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16 or float16.")]
Proposer = Annotated[str | None, typer.Option("--proposer", help="eagle3, ngram or none.")]
NumSpeculativeTokens = Annotated[
    int | None,
    typer.Option("--num-speculative-tokens", "--gamma", min=0, help="Drafts in each round."),
]
Temperature = Annotated[
    float, typer.Option("--temperature", min=0, help="0 takes the likeliest token.")
]
Seed = Annotated[int, typer.Option("--seed", help="Noise of a temperature above 0.")]
