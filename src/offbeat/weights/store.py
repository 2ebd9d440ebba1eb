"""The folder of published weights: one sub-folder per version, whole and verified or not there at all.

A version's number only grows and is never reused; its folder is written beside its place, flushed and renamed, so a
reader never sees half of one. `read` recomputes the digest: weights that do not match what was published are refused.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from offbeat.files import fsync_file, replace_folder
from offbeat.weights.digest import weights_digest
from offbeat.weights.folder import FILE_NAME, WeightFolder
from offbeat.weights.verify import WeightsError, verify
from offbeat.weights.version import Version


class WeightStore(WeightFolder):
    """Writes versions below one folder."""

    def write(self, number: int, step: int, parent: int | None, tensors: Mapping[str, Tensor]) -> Version:
        """Puts a version on disk; nobody knows of it until its row stands in the ledger."""
        held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        final = self.path(number)
        draft = self.draft(number)
        try:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            save_file(held, draft / FILE_NAME)
            fsync_file(draft / FILE_NAME)
            shutil.rmtree(final, ignore_errors=True)  # left by a writer that died before its row was written
            replace_folder(draft, final)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(draft, ignore_errors=True)
            reason = " ".join(str(error).split())
            raise WeightsError(
                f"cannot write the weights of step {step} to {final}: {reason}; free space, then --resume"
            ) from error
        return Version(number=number, step=step, parent=parent, digest=weights_digest(held), path=final)


def read(version: Version) -> dict[str, Tensor]:
    """A version's tensors, or `WeightsError` if their digest is not the published one."""
    verify(version)
    return load_file(version.path / FILE_NAME)
