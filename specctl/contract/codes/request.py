"""Family 9: runtime request, and the files a benchmark reads its requests from."""

from __future__ import annotations

from specctl.contract.codes.table import Code

CODES: tuple[Code, ...] = (
    Code(
        code="SD901",
        slug="body-not-json",
        severity="error",
        summary="The request body is not a JSON object.",
        why="Nothing can be read from it; the server answers 400 and runs nothing.",
        fix="Send a JSON object with `Content-Type: application/json`",
    ),
    Code(
        code="SD902",
        slug="unknown-field",
        severity="error",
        summary="The request has a field that this endpoint does not know.",
        why="A misspelt option that is ignored looks like an option that has no effect.",
        fix="Correct the name or leave the field out; docs/reference/server.md lists every field",
    ),
    Code(
        code="SD903",
        slug="field-type",
        severity="error",
        summary="A request field has a value of the wrong type.",
        why="Converting it silently (a string to a number, a float to an integer) hides mistakes.",
        fix="Send the field with the type named under `expected`",
    ),
    Code(
        code="SD904",
        slug="field-range",
        severity="error",
        summary="A request field is outside the range this server accepts.",
        why="Clamping it would give another answer than the one that was asked for.",
        fix="Send a value in the range named under `expected`",
    ),
    Code(
        code="SD905",
        slug="option-unsupported",
        severity="error",
        summary="The request asks for an option that this server does not implement.",
        why=(
            "An option is honoured or refused; ignoring it would return an answer to another "
            "request."
        ),
        fix="Leave the field out",
    ),
    Code(
        code="SD906",
        slug="field-missing",
        severity="error",
        summary="A required request field is absent.",
        why="There is no default for it: nothing can be generated.",
        fix="Add the field",
    ),
    Code(
        code="SD907",
        slug="model-unknown",
        severity="error",
        summary="The request names a model that this server does not serve.",
        why="Answering with another model than the one named would go unnoticed.",
        fix="Use the id that `GET /v1/models` lists",
    ),
    Code(
        code="SD908",
        slug="prompt-empty",
        severity="error",
        summary="The prompt has no tokens.",
        why=(
            "The first token is predicted from the prompt; a model without a begin token has "
            "nothing to start from."
        ),
        fix="Send at least one token",
    ),
    Code(
        code="SD909",
        slug="prompt-too-long",
        severity="error",
        summary="The prompt and the tokens asked for do not fit into the context.",
        why=(
            "Cutting the prompt would answer another question; positions beyond the limit were "
            "never trained."
        ),
        fix="Shorten the prompt or ask for fewer tokens",
    ),
    Code(
        code="SD910",
        slug="token-id-out-of-range",
        severity="error",
        summary="A token id is not a row of the target's embedding.",
        why="Reading beyond the embedding is undefined; on a GPU it takes the process down.",
        fix="Encode the prompt with the target's own tokenizer",
    ),
    Code(
        code="SD911",
        slug="tokenizer-missing",
        severity="error",
        summary="The target directory has no tokenizer.json.",
        why="Text prompts cannot be encoded and answers cannot be decoded without it.",
        fix=(
            "Copy tokenizer.json into the target directory, or convert the slow tokenizer with "
            "transformers"
        ),
    ),
    Code(
        code="SD912",
        slug="chat-template-missing",
        severity="error",
        summary="Chat messages were sent to a target without a chat template.",
        why="Joining messages by a guessed rule gives answers that are worse and never fail.",
        fix=(
            "Use /v1/completions (`generate --raw`), or add chat_template.jinja to the target "
            "directory"
        ),
    ),
    Code(
        code="SD913",
        slug="chat-template-refused",
        severity="error",
        summary="The target's chat template raised an error for these messages.",
        why=(
            "Templates state which roles may follow each other; the model was trained on nothing "
            "else."
        ),
        fix="Follow the rule named in the message",
    ),
    Code(
        code="SD914",
        slug="queue-full",
        severity="error",
        summary="As many requests wait as the server lets wait.",
        why="A longer queue only adds waiting time and memory; the answer is 429 with Retry-After.",
        fix="Try again after the seconds in `Retry-After`, or raise `--max-num-waiting`",
    ),
    Code(
        code="SD915",
        slug="server-stopping",
        severity="error",
        summary=(
            "The server is shutting down: it takes no new request, or its grace time has passed."
        ),
        why=(
            "Running requests get the grace time to finish; what is left then ends with this error."
        ),
        fix="Send the request to another replica, or again after the restart",
    ),
    Code(
        code="SD916",
        slug="request-failed",
        severity="error",
        summary="The engine failed while it ran this request.",
        why="This is a fault of the server, not of the request; other requests go on.",
        fix="Report it with the manifest and the server log around the request id",
    ),
    Code(
        code="SD917",
        slug="body-too-large",
        severity="error",
        summary="The request body is larger than the server reads.",
        why="A body is held in memory; the limit keeps one client from filling it.",
        fix="Send fewer prompts in one request",
    ),
    Code(
        code="SD918",
        slug="route-unknown",
        severity="error",
        summary="No such path, or the path does not take this method.",
        why="A client with a wrong base URL should see which paths exist.",
        fix="Use a base URL that ends in `/v1`; docs/reference/server.md lists the paths",
    ),
    Code(
        code="SD919",
        slug="fields-conflict",
        severity="error",
        summary="Two request fields contradict each other.",
        why="Whichever one were preferred, the other would be ignored.",
        fix="Make the two agree, or leave one of them out",
    ),
    Code(
        code="SD920",
        slug="prompt-file-format",
        severity="error",
        summary="A prompt file cannot be read: unknown form, a broken line, or no prompt in it.",
        why="Skipping lines would change the benchmark without a trace.",
        fix=(
            "Use MT-Bench jsonl (`turns`), chat jsonl (`messages`), plain text, or a JSON of "
            "token ids"
        ),
    ),
    Code(
        code="SD921",
        slug="prompt-set-unknown",
        severity="error",
        summary="A file with several sets needs the name of one of them.",
        why="Taking the first set would benchmark something that was not named.",
        fix="Name a set that the file has",
    ),
    Code(
        code="SD922",
        slug="reference-mismatch",
        severity="error",
        summary="The reference file does not belong to these prompts.",
        why=(
            "Comparing answers with the references of other prompts shows differences that mean "
            "nothing."
        ),
        fix="Give the reference file that was made from the same prompts, in the same order",
    ),
    Code(
        code="SD923",
        slug="logits-not-numbers",
        severity="error",
        summary="The target computed NaN where a token of this request is chosen.",
        why=(
            "A sampler would choose something from them, and the answer would look like one. "
            "Damaged weights, or a number format whose range the model leaves, are the causes seen."
        ),
        fix=(
            "Look for NaN in the weights with `specctl validate --deep`; run in bfloat16 or "
            "float32 if the model was trained so"
        ),
    ),
    Code(
        code="SD924",
        slug="no-token-left",
        severity="error",
        summary="Every token is masked at a position: options or a grammar leave none to choose.",
        why="Any token taken here would break one of the options that the request set.",
        fix=(
            "Lift one of them: `min_tokens` masks end tokens, `logit_bias` may forbid all others, "
            "and a grammar may contradict both"
        ),
    ),
    Code(
        code="SD925",
        slug="bench-records-unreadable",
        severity="error",
        summary="A directory does not hold the records of one benchmark.",
        why=(
            "A report on part of the runs, or on runs of two benchmarks, would look like any other."
        ),
        fix="Name a directory that `specctl bench --output DIR` wrote, with a point that ended",
    ),
)
