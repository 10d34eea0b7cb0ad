"""The verification mode of a manifest, when the user states one."""

from __future__ import annotations

import msgspec

from specctl.contract.fingerprint import fingerprint
from specctl.contract.manifest import Manifest, Origin, Sampling, VerificationMode

OPTION = "--verification"


def with_verification(manifest: Manifest, mode: VerificationMode) -> Manifest:
    """Return the manifest with a given mode; the fingerprint covers it.

    Args:
        manifest: complete.
        mode: how drafts of sampled requests are decided about.
    """
    sampling = Sampling(verification=mode)
    return msgspec.structs.replace(
        manifest,
        sampling=sampling,
        fingerprint=fingerprint(
            target=manifest.target,
            draft=manifest.draft,
            geometry=manifest.geometry,
            vocabulary=manifest.vocabulary,
            sampling=sampling,
        ),
        origins={**manifest.origins, "sampling": Origin(kind="given", where=OPTION)},
    )
