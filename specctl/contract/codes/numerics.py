"""Family 5, continued: what the stored numbers tell; only `--deep` reads them."""

from __future__ import annotations

from specctl.contract.codes.table import Code

CODES: tuple[Code, ...] = (
    Code(
        code="SD520",
        slug="weight-not-finite",
        severity="error",
        summary="A weight holds NaN or infinite values.",
        why="One such value makes every logit NaN; the draft then proposes token 0 or nothing.",
        fix="Export again from a checkpoint of the training run before the values broke",
    ),
    Code(
        code="SD521",
        slug="weight-all-zero",
        severity="warning",
        summary="Every element of a weight is zero.",
        why="An embedding, head, norm or Markov matrix of zeros was never written: libraries fill "
        "what a file lacks with zeros and save it, or a download reserved the space and failed.",
        fix="Restore the tensor; an embedding equal to the target's may be left out instead",
        source="Speculators 0.9.0 saves an EAGLE-3 embedding that it could not load as zeros",
    ),
    Code(
        code="SD522",
        slug="rows-all-zero",
        severity="warning",
        summary="Rows of an embedding or head that belong to tokens are zero.",
        why="Zero rows are normal for padding above the tokenizer; for a token they mean that it "
        "was never trained or its bytes are lost.",
        fix="Compare with the source's digest; ignore this for tokens that never occur",
        source="foundry-local issue 910: a preallocated file of zeros",
    ),
    Code(
        code="SD523",
        slug="rows-identical",
        severity="warning",
        summary="Most rows of an embedding or head are copies of one another.",
        why="Rows that are all alike rank no token over another; a broadcast or a failed resize "
        "leaves such rows.",
        fix="Restore the tensor from the training run",
    ),
    Code(
        code="SD524",
        slug="weight-looks-uninitialised",
        severity="warning",
        summary="A weight has the spread of a fresh normal initialisation and no structure.",
        why="Training changes the spread of rows; a matrix whose rows all have exactly the spread "
        "of `initializer_range` was most likely created by a loader and saved.",
        fix="Check that the tensor was in the file that this checkpoint was converted from",
        source="TorchSpec issue 38: the exporter wrote a random embedding",
    ),
    Code(
        code="SD525",
        slug="embedding-equals-target",
        severity="info",
        summary="A stored embedding or head is the target's, row by row.",
        why="It may be shared: memory is saved, and nothing changes.",
        fix="Nothing to do; the tensor may be left out where the engine shares the target's",
    ),
    Code(
        code="SD526",
        slug="embedding-trained-copy",
        severity="info",
        summary="A stored embedding or head was trained from the target's and differs from it.",
        why="It must be kept: engines that replace it by the target's compute something else.",
        fix="Nothing to do; make sure that the engine does not share it",
    ),
    Code(
        code="SD527",
        slug="embedding-unrelated",
        severity="warning",
        summary="A stored embedding or head has nothing in common with the target's.",
        why="Drafts start from the target's embedding; unrelated rows come from another target, "
        "another tokenizer, or from an exporter that wrote random values.",
        fix="Leave the tensor out if the draft was trained with the target's, or find its target",
        source="TorchSpec issue 38",
    ),
    Code(
        code="SD528",
        slug="weight-constant",
        severity="warning",
        summary="Every element of a matrix has the same value.",
        why="A constant matrix gives every input the same answer; it was filled, not trained.",
        fix="Restore the tensor from the training run",
    ),
    Code(
        code="SD529",
        slug="mask-row-zero",
        severity="warning",
        summary="The embedding row of the mask token is zero.",
        why="Every slot after the anchor is fed this row. Some drafts keep the vector in a file "
        "beside the weights; without it the slots carry no signal.",
        fix="Find the mask vector that the draft was trained with",
        source="vLLM issue 46104",
    ),
    Code(
        code="SD532",
        slug="map-rows-belong-elsewhere",
        severity="error",
        summary="The rows of a reduced head are the target's rows of other ids than the map says.",
        why="Map and head come from different orders, so every proposal is another token than the "
        "one that was meant. Nothing crashes; the accept length is 1.",
        fix="Take map and weights from the same training run; where the map was built by hand, "
        "build it again in the order of the head's rows",
    ),
)
