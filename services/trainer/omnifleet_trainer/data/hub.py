"""Named sets from the Hugging Face hub into a folder: one revision, resumed where it broke off, once for all processes."""

from __future__ import annotations

import json
import os
from pathlib import Path

from omnifleet.errors import OmnifleetError, Reason, invalid

REPOSITORIES: dict[str, str | dict[str, str]] = {
    "avqa": "gijs/avqa-processed",
    "clevr-cogent": {
        "train": "MMInstruction/Clevr_CoGenT_TrainA_70K_Complex",
        "valA": "MMInstruction/Clevr_CoGenT_ValA",
        "valB": "MMInstruction/Clevr_CoGenT_ValB",
    },
    "geometry3k": "hiyouga/geometry3k",
    "mmpr-tiny": "OpenGVLab/MMPR-Tiny",
    "refcoco": "jxu124/refcoco",
}
"""Set -> repository, or split -> repository. The pictures of refcoco are COCO 2014's and not on the hub: train2014/ by hand."""

READY = ".omnifleet-ready.json"
_LOCK_S = 6 * 3600.0


def fetch(name: str, split: str, folder: Path, revision: str) -> str:
    """Have `folder` hold the set at `revision` (a commit, branch or tag); returns the commit.

    A complete folder of that revision is left alone, without the network. Others wait for the one that downloads. HF_ENDPOINT
    and HF_TOKEN are honoured. Raises NOT_FOUND (set, repository, revision), CONFLICT (the folder holds another revision),
    UNAVAILABLE (retryable: what came so far is kept), DEADLINE.
    """
    import filelock

    repository = _repository(name, split)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(folder / ".omnifleet-lock", timeout=_LOCK_S):
            return _ready(folder, repository, revision) or _download(folder, repository, revision)
    except filelock.Timeout as error:
        raise OmnifleetError(
            Reason.DEADLINE, f"{folder} is locked by another download", retryable=True
        ) from error


def _repository(name: str, split: str) -> str:
    found = REPOSITORIES.get(name)
    if isinstance(found, dict):
        found = found.get(split)
    if found is None:
        known = ", ".join(REPOSITORIES)
        raise invalid(
            f"no repository is known of {name} / {split}; known sets: {known}", reason=Reason.NOT_FOUND
        )
    return found


def _ready(folder: Path, repository: str, revision: str) -> str:
    """The commit that is complete in the folder, "" if none is."""
    try:
        marker = json.loads((folder / READY).read_bytes())
    except FileNotFoundError:
        return ""
    except ValueError as error:
        raise invalid(f"{folder / READY} is damaged: {error}", reason=Reason.CORRUPT) from error
    if marker["repository"] != repository or revision not in (marker["revision"], marker["commit"]):
        raise OmnifleetError(
            Reason.CONFLICT,
            f"{folder} holds {marker['repository']} at {marker['revision']}, not {repository} at {revision}",
            knob="data.train.path: a folder for each revision",
        )
    return str(marker["commit"])


def _download(folder: Path, repository: str, revision: str) -> str:
    import httpx
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    endpoint = os.environ.get("HF_ENDPOINT") or None
    try:
        commit = HfApi(endpoint=endpoint).dataset_info(repository, revision=revision).sha
        assert commit is not None, "the hub names a commit for every revision"
        snapshot_download(
            repository, repo_type="dataset", revision=commit, local_dir=folder, endpoint=endpoint
        )
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise invalid(f"{repository} at {revision}: {error}", reason=Reason.NOT_FOUND) from error
    except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise OmnifleetError(
            Reason.UNAVAILABLE,
            f"{repository} could not be downloaded; what came so far is kept in {folder}: {error}",
            retryable=True,
            knob="HF_ENDPOINT",
        ) from error
    scratch = folder / f"{READY}.tmp"
    scratch.write_text(json.dumps({"repository": repository, "revision": revision, "commit": commit}))
    scratch.replace(folder / READY)
    return commit
