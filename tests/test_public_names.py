"""What users import: a name that goes, or comes, is a decision."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

NAMES = {
    "ckpt_core": """
        Auto BarrierError Checkpointer CkptError CommitError ConfigError CoordinationTimeout CorruptCheckpoint
        DirectIO EveryNSteps EverySeconds FilesSave FlatPart LastStep LayerwiseSave Level Meter Mode
        NotCommitted OnError Options PersistError Report RestoreError RestoredStep RngState RootBusy
        SaveHandle StagingError StateMismatch StoreOptions TorchStore UnknownFormat UntrustedData
        __version__ bring_directory committed_directories committed_steps load step_path verify
    """,
    "ckpt_deepspeed": "CkptCoreEngine EngineSettings Wait attach close register wait wait_staged",
    "ckpt_horovod": "Checkpoints DistributedOptimizer Layerwise coordination",
    "ckpt_lightning": "AsyncCheckpoint CheckpointWarning FabricCheckpoint StepIO load",
    "ckpt_transformers": "AcceleratorCheckpoint AsyncCheckpoint CheckpointWarning export",
}


TOP = Path(__file__).parents[1]


@pytest.mark.parametrize("package", NAMES)
def test_the_public_names_are_these(package: str) -> None:
    folder = next(path for path in (TOP / package, TOP / "integrations" / package) if path.exists())
    # Read, not imported: no framework is needed for it.
    tree = ast.parse((folder / "__init__.py").read_text())
    (names,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert sorted(names) == sorted(NAMES[package].split())
