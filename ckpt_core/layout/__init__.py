"""Where every byte of a checkpoint lies, and the files that say so. No I/O, no threads, no torch.

Call order of a save: `ShardLayout.plan` (or `LayoutBuilder`, when the order of leaves becomes known
one by one) gives offsets and the shard file's header; when the file is written, `RankManifest`
lists it, and `Manifest` lists the ranks. A load goes back: `Manifest.decode`, `RankManifest.decode`
and the offsets of its leaves. When several ranks save together, `share_leaves` comes first: it says
which part of each leaf a rank stores; `uncovered` and `needed_ranges` put the parts together again.
`parse_header` reads a shard file alone, as other readers do.

Idea: a shard file is a data map and one contiguous tensor region, in the order in which leaves
become ready, so that staging copies each leaf straight to its place in the file.

Source: LightCheck III-D, DeepFreeze IV-A d. The bytes are specified in docs/format.md.
"""

from __future__ import annotations

from ckpt_core.layout.coverage import Effort, needed_ranges, uncovered
from ckpt_core.layout.dtypes import Storage, in_header, itemsize, nbytes, storage
from ckpt_core.layout.entries import ChunkSum, FileEntry, LeafEntry, RankEntry, SliceEntry
from ckpt_core.layout.header import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    METADATA_KEY,
    PAD_PREFIX,
    plain_header,
)
from ckpt_core.layout.manifest import Json, Manifest, RankManifest, RankText
from ckpt_core.layout.marks import retired_in, retired_mark
from ckpt_core.layout.names import (
    FORMAT_NAME,
    FORMAT_VERSION,
    MANIFEST_NAME,
    RUN_NAME,
    is_directory_name,
    is_file_name,
    parents_of,
    parse_shard_name,
    rank_manifest_name,
    shard_name,
)
from ckpt_core.layout.parse import HeaderEntry, header_length, parse_header
from ckpt_core.layout.rules import MAX_MANIFEST_BYTES, MAX_UNIX_S, check_block
from ckpt_core.layout.shard import BuilderMark, Extent, LayoutBuilder, ShardLayout
from ckpt_core.layout.share import share_leaves, structure_hash

__all__ = [
    "FORMAT_NAME",
    "FORMAT_VERSION",
    "LENGTH_BYTES",
    "MANIFEST_NAME",
    "MAX_HEADER_BYTES",
    "MAX_MANIFEST_BYTES",
    "MAX_UNIX_S",
    "METADATA_KEY",
    "PAD_PREFIX",
    "RUN_NAME",
    "BuilderMark",
    "ChunkSum",
    "Effort",
    "Extent",
    "FileEntry",
    "HeaderEntry",
    "Json",
    "LayoutBuilder",
    "LeafEntry",
    "Manifest",
    "RankEntry",
    "RankManifest",
    "RankText",
    "ShardLayout",
    "SliceEntry",
    "Storage",
    "check_block",
    "header_length",
    "in_header",
    "is_directory_name",
    "is_file_name",
    "itemsize",
    "nbytes",
    "needed_ranges",
    "parents_of",
    "parse_header",
    "parse_shard_name",
    "plain_header",
    "rank_manifest_name",
    "retired_in",
    "retired_mark",
    "shard_name",
    "share_leaves",
    "storage",
    "structure_hash",
    "uncovered",
]
