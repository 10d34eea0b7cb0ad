"""The routes of ModelScope that its client needs, for `tests.mock_hub`."""

from __future__ import annotations

import hashlib
from typing import Any

from tests.mock_hub import COMMIT, TOKEN, Fault, Handler, Repo, Sparse, size_of


class ModelScopeRoutes:
    """The routes under /api/v1 that the client needs."""

    def __init__(self, handler: Handler, fault: Fault, query: dict[str, str]) -> None:
        self._handler = handler
        self._fault = fault
        self._query = query

    def answer(self, name: str, route: str) -> None:
        handler = self._handler
        repo = handler.hub.repos.get(name)
        has_token = handler.headers.get("Authorization") == f"Bearer {TOKEN}"
        revision = self._query.get("Revision", "master")
        if repo is None:
            self._refuse(404, "the model does not exist")
        elif repo.gate == "closed" or (repo.gate == "login" and not has_token):
            self._refuse(403 if has_token else 401, "no access")
        elif route == "revisions":
            branches = [{"Revision": revision} for revision in repo.revisions]
            self._data({"RevisionMap": {"Branches": branches, "Tags": []}})
        elif revision not in repo.revisions:
            self._refuse(404, "no such revision")
        elif route == "repo/files":
            self._data({"Files": [self._entry(p, c) for p, c in repo.files.items()]})
        else:
            self._file(name, repo, self._query.get("FilePath", ""))

    def _file(self, name: str, repo: Repo, path: str) -> None:
        content = repo.files.get(path)
        handler = self._handler
        if content is None:
            self._refuse(404, "no such file")
        elif path.endswith((".safetensors", ".bin")) and handler.hub.redirects_weights:
            handler.send(302, b"", {"Location": f"{handler.hub.cdn}/{name}//{path}"})
        else:
            handler.send_file(content, self._fault, {})

    def _entry(self, path: str, content: bytes | Sparse) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else None
        entry = {"Name": path.rpartition("/")[2], "Path": path, "Type": "blob"}
        return {**entry, "Size": size_of(content), "Sha256": digest, "Revision": COMMIT}

    def _data(self, value: Any) -> None:
        self._handler.send_json({"Code": 200, "Success": True, "Message": "", "Data": value})

    def _refuse(self, status: int, message: str) -> None:
        self._handler.send_json(
            {"Code": status, "Success": False, "Message": message}, None, status
        )
