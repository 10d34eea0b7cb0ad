"""Family 8, SD860-SD879: prefill and decode in different processes."""

from __future__ import annotations

from specctl.contract.codes.table import Code

CODES: tuple[Code, ...] = (
    Code(
        code="SD860",
        slug="handshake-differs",
        severity="error",
        summary="A prefill and a decode server disagree on something that makes tokens or bytes.",
        why=(
            "KV of another model, layout or kernel table has the right size and the wrong numbers: "
            "a transfer would succeed and the text would be wrong."
        ),
        fix="Start both servers from the same manifest, version and settings",
    ),
    Code(
        code="SD861",
        slug="peer-unreachable",
        severity="error",
        summary="A peer of a disaggregated server cannot be reached, or its connection ended.",
        why="Without the peer a request has no prefill; it is tried on another peer, or ends.",
        fix="Check the address and the log of the peer; `/health` of the router lists its peers",
    ),
    Code(
        code="SD862",
        slug="kv-cannot-be-resharded",
        severity="error",
        summary="The KV of a prefill server cannot be spread over the ranks of a decode server.",
        why=(
            "KV travels by whole heads. A rank with part of a head, or a layer that the other side "
            "does not have, would attend to other numbers than the prefill computed."
        ),
        fix="Choose tensor-parallel sizes that divide the KV heads on both sides",
    ),
    Code(
        code="SD863",
        slug="kv-transfer-failed",
        severity="error",
        summary="KV could not be written into the decode server's memory.",
        why=(
            "Blocks that did not arrive hold another request's keys: the request must not decode "
            "from them. It is tried on another peer, or ends."
        ),
        fix="Look at the network and at the peer's log; `--transport shared` needs one machine",
    ),
    Code(
        code="SD864",
        slug="prefill-too-late",
        severity="error",
        summary="A prefill server did not finish a prompt within the time that a request may wait.",
        why=(
            "A request that waits holds KV blocks of the decode server. It is not tried elsewhere: "
            "where prompts queue, a second try makes every queue longer."
        ),
        fix="Add prefill servers, or raise `--prefill-timeout-s`",
    ),
    Code(
        code="SD865",
        slug="peer-address-unreadable",
        severity="error",
        summary="An address of a prefill, decode or listening server is not HOST:PORT.",
        why="A server that guessed the port would wait for a peer that never comes.",
        fix="Write HOST:PORT, several of them with commas between; IPv6 hosts in brackets",
    ),
    Code(
        code="SD866",
        slug="no-decode-server",
        severity="error",
        summary="A router has no decode server for a request, or lost the one that answered it.",
        why=(
            "A request moves to another decode server only before its client has seen a byte: a "
            "second start in mid-stream would repeat or change text."
        ),
        fix="Look at the router's `/health`, which tells the state of every decode server",
    ),
    Code(
        code="SD867",
        slug="draft-state-differs",
        severity="error",
        summary="A prefill server sent another state of the draft than the decode server keeps.",
        why=(
            "Drafts are made from the state that the draft had after the prompt. With a part of it "
            "missing, or of another width, the draft goes on from numbers of another request: "
            "output stays right and accept length sinks."
        ),
        fix="Start both servers from the same manifest, version and settings",
    ),
    Code(
        code="SD868",
        slug="prefill-server-has-no-clients",
        severity="error",
        summary="A client's request reached the engine of a prefill server.",
        why="A prefill server computes prompts for decode servers, which answer clients.",
        fix="Send requests to a decode server or to the router",
    ),
    Code(
        code="SD869",
        slug="role-ranks-do-not-divide-heads",
        severity="error",
        summary="A prefill or decode server cannot be spread over this number of ranks.",
        why=(
            "KV travels by whole heads. A rank that held a part of a head could neither offer it "
            "to a prefill server nor send it to a decode server."
        ),
        fix="Choose a `--tp` that divides the KV heads; the other side may have another one",
    ),
    Code(
        code="SD870",
        slug="rank-of-another-server",
        severity="error",
        summary="A rank of a prefill server is another process than its first rank said.",
        why=(
            "Every rank of a prefill server writes its own part of the KV. A process of an earlier "
            "start, or of another layout, at that address would leave blocks unwritten or write "
            "others."
        ),
        fix="Wait for the end of what listens there, then start the prefill server again",
    ),
    Code(
        code="SD871",
        slug="ranks-differ",
        severity="error",
        summary="The ranks of one prefill or decode server would compute other bits.",
        why=(
            "Ranks on other kinds of GPU, or with other kernels, round differently: the KV that "
            "the first rank vouches for in the handshake would not be that of the others."
        ),
        fix="Run all ranks of a server on the same GPU architecture and version",
    ),
    Code(
        code="SD872",
        slug="kv-incomplete",
        severity="error",
        summary="The KV that arrived for a prompt has another size than the blocks that wait.",
        why=(
            "Every rank of a prefill server writes its part. With one part missing, or a layer "
            "sent twice, decoding would attend to what the blocks held before, and the text would "
            "be wrong without any other sign."
        ),
        fix="Run both servers with the same version; where they have it, report this as an error",
    ),
)
