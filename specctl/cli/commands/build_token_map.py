"""`specctl build-token-map`."""

from __future__ import annotations

from specctl.cli import output
from specctl.cli.shared_options import Json
from specctl.cli.token_map_answer import answer_report
from specctl.cli.token_map_counting import (
    AssistantOnly,
    ChatTemplate,
    Corpus,
    CountEngine,
    CountMethod,
    Counts,
    Engine,
    Field,
    HeldOut,
    IdType,
    LanguageField,
    Method,
    RayAddress,
    Role,
    Workers,
    corpus_spec,
    count_options,
    with_standard_input,
)
from specctl.cli.token_map_options import (
    Acceptance,
    Bandwidth,
    DivisibleBy,
    Gamma,
    Keep,
    LostRatio,
    ManifestFile,
    MaxLoss,
    OutputDirectory,
    Outputs,
    Size,
    Tokenizer,
    Weight,
    cut_options,
)
from specctl.ops.build_token_map import build_token_map as build
from specctl.ops.cut_token_map import OUTPUT


def build_token_map(
    corpus: Corpus,
    tokenizer: Tokenizer = None,
    size: Size = None,
    divisible_by: DivisibleBy = 1,
    max_loss: MaxLoss = None,
    field: Field = None,
    role: Role = None,
    assistant_only: AssistantOnly = False,
    chat_template: ChatTemplate = False,
    id_type: IdType = None,
    language_field: LanguageField = None,
    held_out: HeldOut = None,
    counts: Counts = None,
    workers: Workers = None,
    method: Method = CountMethod.auto,
    engine: Engine = CountEngine.local,
    ray_address: RayAddress = None,
    weight: Weight = None,
    keep: Keep = None,
    outputs: Outputs = None,
    manifest: ManifestFile = None,
    acceptance: Acceptance = None,
    lost_ratio: LostRatio = None,
    gamma: Gamma = None,
    bandwidth: Bandwidth = None,
    output_directory: OutputDirectory = OUTPUT,
    json: Json = False,
) -> None:
    """Count a corpus and write reduced vocabularies: JSON, .pt, d2t/t2d safetensors, freq_N.pt.

    One document in ten is held out by its content and measures coverage. End ids, special tokens
    and the tokens of the chat template are always in the map.
    """
    counting = count_options(
        counts=counts, workers=workers, method=method, engine=engine, ray_address=ray_address
    )
    options = cut_options(
        size=size,
        divisible_by=divisible_by,
        max_loss=max_loss,
        weight=weight,
        keep=keep,
        outputs=outputs,
        manifest=manifest,
        acceptance=acceptance,
        lost_ratio=lost_ratio,
        gamma=gamma,
        bandwidth=bandwidth,
        output=output_directory,
    )
    with output.writing(output_directory), with_standard_input(corpus) as sources:
        spec = corpus_spec(
            corpus=sources,
            field=field,
            role=role,
            assistant_only=assistant_only,
            chat_template=chat_template,
            id_type=id_type,
            language_field=language_field,
            held_out=held_out,
        )
        with output.bar("reading") as step:
            report = build(
                spec, tokenizer=tokenizer, counting=counting, options=options, progress=step
            )
        answer_report(report, options.output, is_json=json)
