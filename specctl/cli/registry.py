"""The commands: one table for dispatch, help, the reference page and the frozen list.

Invariants: reading the table imports no command; the module of a command is
`specctl.cli.commands.<name>` and its function has the same name, with underscores.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One command.

    Args:
        name: as typed.
        summary: one line for the list of commands, no full stop.
        examples: complete command lines that work as written, once the files exist.
    """

    name: str
    summary: str
    examples: tuple[str, ...]

    @property
    def function(self) -> str:
        """Name of the module and of the function in it."""
        return self.name.replace("-", "_")


COMMANDS: tuple[Command, ...] = (
    Command(
        name="inspect",
        summary="Show every fact of a draft or target, and where it was found",
        examples=(
            "specctl inspect path/to/draft",
            "specctl inspect path/to/draft --target path/to/target",
            "specctl inspect path/to/draft --json | jq .geometry",
        ),
    ),
    Command(
        name="validate",
        summary="Check checkpoints and manifests; exit 1 when something is found",
        examples=(
            "specctl validate path/to/draft --target path/to/target",
            "specctl validate manifest.yaml",
            "specctl validate drafts/ --engine sglang --format github",
            "specctl validate token-map/ --target path/to/target",
            "specctl validate --expect fixtures/expected.yaml fixtures/",
        ),
    ),
    Command(
        name="explain",
        summary="Say what a diagnostic code means and what to do about it",
        examples=("specctl explain SD302", "specctl explain anchor-width-mismatch"),
    ),
    Command(
        name="manifest",
        summary="Write the manifest of a target and its draft, each fact with its origin",
        examples=(
            "specctl manifest path/to/target path/to/draft -o manifest.yaml",
            "specctl manifest path/to/target path/to/draft --num-speculative-tokens 4",
            "specctl manifest path/to/target -o target-only.yaml",
            "specctl manifest --schema",
        ),
    ),
    Command(
        name="convert",
        summary="Write a draft in another dialect, the same tensors byte for byte",
        examples=(
            "specctl convert --to help",
            "specctl convert path/to/draft --to sglang --target path/to/target -o out",
            "specctl convert path/to/draft --to vllm --target path/to/target --gamma 5 -o out",
            "specctl convert path/to/target --to speculators --gamma 1 -o mtp",
            "specctl convert path/to/draft --to modelopt -o converted --dry-run",
            "specctl convert mtp --stitch-into path/to/target -o stitched",
        ),
    ),
    Command(
        name="normalize",
        summary="Write a draft again in its own dialect, every fact in the usual place",
        examples=(
            "specctl normalize path/to/draft --dry-run",
            "specctl normalize path/to/draft -o canonical --set num_speculative_tokens=7",
        ),
    ),
    Command(
        name="build-token-map",
        summary="Count a corpus and write a reduced vocabulary",
        examples=(
            "specctl build-token-map corpus/",
            "specctl build-token-map a.jsonl b.txt --tokenizer path/to/target --size 8192 -o map/",
            "specctl build-token-map corpus/ --counts counts.safetensors --size 16k,32k,64k",
        ),
    ),
    Command(
        name="cut-token-map",
        summary="Cut reduced vocabularies of any size from counts",
        examples=(
            "specctl cut-token-map counts.safetensors --tokenizer path/to/target --size 32k",
            "specctl cut-token-map counts.safetensors --outputs bench/ --manifest m.yaml",
            "specctl cut-token-map freq_32768.pt --tokenizer path/to/target --size 16k -o map/",
        ),
    ),
    Command(
        name="plan",
        summary="Show what each pipeline stage and tensor-parallel rank of a manifest holds",
        examples=(
            "specctl plan manifest.yaml --pp 4",
            "specctl plan manifest.yaml --pp 3 --tp 2 --stage-layers 12,10,8",
        ),
    ),
    Command(
        name="generate",
        summary="Answer one prompt with a manifest",
        examples=('specctl generate manifest.yaml "What is a draft model?"',),
    ),
    Command(
        name="serve",
        summary="Serve a manifest through an OpenAI-compatible HTTP interface",
        examples=("specctl serve manifest.yaml --port 8000",),
    ),
    Command(
        name="route",
        summary="Give clients one address in front of several decode servers",
        examples=("specctl route --decode 127.0.0.1:8001,127.0.0.1:8002 --port 8000",),
    ),
    Command(
        name="bench",
        summary="Compare decoding with and without the draft on a prompt file",
        examples=("specctl bench manifest.yaml --prompts prompts.jsonl --max-tokens 128",),
    ),
    Command(
        name="doctor",
        summary="Say what this machine can run and how to add what is missing",
        examples=("specctl doctor", "specctl doctor --json"),
    ),
)

BY_NAME: dict[str, Command] = {command.name: command for command in COMMANDS}
