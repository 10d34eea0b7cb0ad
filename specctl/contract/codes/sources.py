"""Family 1, second part: hubs, caches and downloads."""

from __future__ import annotations

from specctl.contract.codes.table import Code

CODES: tuple[Code, ...] = (
    Code(
        code="SD136",
        slug="hub-login-needed",
        severity="error",
        summary="The hub refuses the repository without a login, or to this login.",
        why="The repository is gated or private; its files are only given to accounts with access.",
        fix="Accept the terms on the repository's page, then `hf auth login` (or set HF_TOKEN); "
        "for ModelScope `modelscope login` (or set MODELSCOPE_API_TOKEN)",
    ),
    Code(
        code="SD137",
        slug="hub-repository-missing",
        severity="error",
        summary="The hub has no repository of this name that this login may see.",
        why="A hub does not tell a private repository from one that does not exist.",
        fix="Check the spelling of org/name, and log in when the repository is private",
    ),
    Code(
        code="SD138",
        slug="hub-revision-missing",
        severity="error",
        summary="The repository has no such branch, tag or commit.",
        why="Without the revision it is open which files are meant.",
        fix="Name a branch, tag or commit of the repository after `@`, or leave it out",
    ),
    Code(
        code="SD139",
        slug="hub-file-missing",
        severity="error",
        summary="The hub does not give a file, or the repository has no such subfolder.",
        why="The list of files and the files disagree, or the subfolder is spelled differently.",
        fix="Look at the file list on the repository's page; try again when it was just changed",
    ),
    Code(
        code="SD140",
        slug="hub-rate-limit",
        severity="error",
        summary="The hub answers that too many requests were made, also after waiting.",
        why="Hubs count requests for each address or account; a login has a higher limit.",
        fix="Wait for the stated time, or log in, then run the command again",
    ),
    Code(
        code="SD141",
        slug="hub-unreachable",
        severity="error",
        summary="No connection to the hub: no such host, refused, or no answer in time.",
        why="Nothing can be read from the hub; what is in its cache still can.",
        fix="Check the network and HF_ENDPOINT or MODELSCOPE_DOMAIN; `--offline` reads the cache",
    ),
    Code(
        code="SD142",
        slug="hub-connection-cut",
        severity="error",
        summary="The connection ended before the requested bytes arrived, at every attempt.",
        why="A header that is cut off proves nothing; what arrived was not used.",
        fix="Run the command again, or download the repository with the hub's own tool first",
    ),
    Code(
        code="SD143",
        slug="hub-without-ranges",
        severity="error",
        summary="The server ignores the requested byte range and offers the whole file.",
        why="Reading one tensor would download the file up to it; the answer was not read.",
        fix="Use a mirror that serves byte ranges, or download the repository, then pass its path",
        source="RFC 9110, section 14.2: a server may ignore the Range header field",
    ),
    Code(
        code="SD144",
        slug="hub-answer-unexpected",
        severity="error",
        summary="The server's answer is not a hub's: an error, a web page, other sizes.",
        why="It is another kind of server, a login page of the network, or a hub with a fault.",
        fix="Check HF_ENDPOINT or MODELSCOPE_DOMAIN; try later when the hub itself has a fault",
    ),
    Code(
        code="SD145",
        slug="hub-offline",
        severity="error",
        summary="Offline, and the hub's cache on this machine does not hold what is needed.",
        why="`--offline` and HF_HUB_OFFLINE forbid every connection.",
        fix="Download it while there is a network: `hf download ORG/NAME`, or for ModelScope "
        "`modelscope download --model ORG/NAME`",
    ),
    Code(
        code="SD146",
        slug="hub-source-malformed",
        severity="error",
        summary="A hub source is not spelled `hf:org/name[@revision][/subfolder]` or `ms:...`.",
        why="Which repository is meant would be a guess.",
        fix="Write `hf:org/name`, `hf:org/name@revision` or `hf:org/name@revision/subfolder`",
    ),
    Code(
        code="SD147",
        slug="hub-client-missing",
        severity="error",
        summary="The hub's client library is not installed, or is too old.",
        why="Logins, caches and mirrors are the client's; there is no second implementation here.",
        fix="`pip install -U huggingface_hub`, for ModelScope `pip install 'specctl[modelscope]'`",
    ),
    Code(
        code="SD148",
        slug="download-incomplete",
        severity="error",
        summary="A download of this checkpoint was interrupted: part of a file is still there.",
        why="An engine starts with what it finds; missing shards stop it or leave weights random.",
        fix="Run the download again; the hub's client goes on where it stopped",
    ),
    Code(
        code="SD149",
        slug="pickle-needs-download",
        severity="error",
        summary="A PyTorch file on a hub has too many tensors to be located by ranged reads.",
        why="The place of every tensor is a request of its own; the whole file is cheaper.",
        fix="Download the repository (`hf download ORG/NAME`) and pass its directory",
    ),
    Code(
        code="SD150",
        slug="pickle-names-ignored",
        severity="warning",
        summary="Under `--allow-pickle`, objects of unknown classes in a pickle were passed over.",
        why="Nothing of them was imported or called; only plain tensors were read, and an engine "
        "that loads this file does run the code it names.",
        fix="Save the plain tensors as safetensors and use that file",
    ),
)
